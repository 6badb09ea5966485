{{/* The prefix of all names, short enough for the longest suffix. */}}
{{- define "corolla.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $prefix := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $prefix .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* Labels that choose this release's pods. */}}
{{- define "corolla.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* A map of labels as the API takes it in a query. */}}
{{- define "corolla.labelSelector" -}}
{{- $terms := list -}}
{{- range $name, $value := . -}}
{{- $terms = append $terms (printf "%s=%s" $name $value) -}}
{{- end -}}
{{ join "," $terms }}
{{- end }}

{{/* Labels of an object: dict "root" "component". */}}
{{- define "corolla.labels" -}}
{{ include "corolla.selector" .root }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "corolla.imageVersion" -}}
{{ with .digest }}@{{ . }}{{ else }}:{{ default .root.Chart.AppVersion .root.Values.image.tag }}{{ end }}
{{- end }}

{{- define "corolla.serverImage" -}}
{{ .Values.image.server }}{{ include "corolla.imageVersion" (dict "root" . "digest" .Values.image.digest.server) }}
{{- end }}

{{- define "corolla.clientImage" -}}
{{ .Values.image.client }}{{ include "corolla.imageVersion" (dict "root" . "digest" .Values.image.digest.client) }}
{{- end }}

{{/* Every router's address, so that gRPC balances calls over them. */}}
{{- define "corolla.routerTarget" -}}
dns:///{{ include "corolla.fullname" . }}-router.{{ .Release.Namespace }}:{{ .Values.router.port }}
{{- end }}

{{- define "corolla.redisSecret" -}}
{{ default (printf "%s-redis" (include "corolla.fullname" .)) .Values.redis.auth.existingSecret }}
{{- end }}
