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

{{/* Labels of an object: dict "root" "component", "own" for further ones that the chart sets, and "labels" for
     those that its values give it. Objects are chosen by what the chart sets, so no value takes its place. */}}
{{- define "corolla.labels" -}}
{{- $own := include "corolla.selector" .root | fromYaml }}
{{- $_ := set $own "app.kubernetes.io/component" .component }}
{{- $_ := set $own "app.kubernetes.io/version" .root.Chart.AppVersion }}
{{- $_ := set $own "app.kubernetes.io/managed-by" .root.Release.Service }}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version) }}
{{- merge $own (default dict .own) (default dict .labels) .root.Values.commonLabels | toYaml }}
{{- end }}

{{/* Annotations of an object, as its values give them. */}}
{{- define "corolla.annotations" -}}
{{- with . }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* An image's name at the registry of all images, if there is one: dict "root" "name". As container runtimes read it, a
     name begins with a registry if its first part has a dot or a port, or is localhost. */}}
{{- define "corolla.image" -}}
{{- $parts := splitList "/" .name }}
{{- with (default dict .root.Values.global).imageRegistry }}
{{- if and (rest $parts) (regexMatch "[.:]|^localhost$" (first $parts)) }}
{{- $parts = rest $parts }}
{{- end }}
{{- $parts = prepend $parts (trimSuffix "/" .) }}
{{- end }}
{{- join "/" $parts }}
{{- end }}

{{- define "corolla.imageVersion" -}}
{{ with .digest }}@{{ . }}{{ else }}:{{ default .root.Chart.AppVersion .root.Values.image.tag }}{{ end }}
{{- end }}

{{- define "corolla.serverImage" -}}
{{ include "corolla.image" (dict "root" . "name" .Values.image.server) }}{{ include "corolla.imageVersion" (dict "root" . "digest" .Values.image.digest.server) }}
{{- end }}

{{- define "corolla.clientImage" -}}
{{ include "corolla.image" (dict "root" . "name" .Values.image.client) }}{{ include "corolla.imageVersion" (dict "root" . "digest" .Values.image.digest.client) }}
{{- end }}

{{/* Every router's address, so that gRPC balances calls over them. */}}
{{- define "corolla.routerTarget" -}}
dns:///{{ include "corolla.fullname" . }}-router.{{ .Release.Namespace }}:{{ .Values.router.port }}
{{- end }}

{{- define "corolla.redisSecret" -}}
{{ default (printf "%s-redis" (include "corolla.fullname" .)) .Values.redis.auth.existingSecret }}
{{- end }}
