{{/* A security context, of a pod or a container, without what is null: that of pools is not taken out by Helm. */}}
{{- define "corolla.securityContext" -}}
{{- $set := dict }}
{{- range $field, $value := . }}
{{- if not (kindIs "invalid" $value) }}
{{- $_ := set $set $field $value }}
{{- end }}
{{- end }}
{{- with $set }}
securityContext: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What every pod has before its containers: dict "root" "values". */}}
{{- define "corolla.pod" -}}
{{- $secrets := concat (default list (default dict .root.Values.global).imagePullSecrets) .root.Values.image.pullSecrets .values.pullSecrets }}
{{- with uniq $secrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ get (ternary . (dict "name" .) (kindIs "map" .)) "name" }}
{{- end }}
{{- end }}
enableServiceLinks: false
{{- include "corolla.securityContext" .values.podSecurityContext }}
{{- with .values.hostAliases }}
hostAliases: {{- toYaml . | nindent 2 }}
{{- end }}
{{- include "corolla.scheduling" .values }}
{{- with .values.extraInitContainers }}
initContainers: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The items of a list that values give: of env, envFrom, volumes, mounts or containers. */}}
{{- define "corolla.items" -}}
{{- with . }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{/* Which nodes a pod may run on. */}}
{{- define "corolla.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}

{{/* How the pods of one object keep apart: dict "values" "selector". */}}
{{- define "corolla.spread" -}}
topologySpreadConstraints:
{{- if .values.topologySpreadConstraints }}
  {{- toYaml .values.topologySpreadConstraints | nindent 2 }}
{{- else }}
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- $.selector | nindent 8 }}
{{- end }}
{{- end }}
{{- end }}

{{/* Probes. Only a process that does not accept connections is restarted: one that is not ready loads, drains or waits,
     and a restart would make that worse. The kubelet shows no certificate, so it asks for health next to the metrics.
     dict "root" "port" "startupSeconds". */}}
{{- define "corolla.probes" -}}
startupProbe:
  tcpSocket: {port: {{ .port }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ ceil (divf .startupSeconds 5) | max 1 }}
readinessProbe:
  httpGet: {path: /health, port: {{ .root.Values.metrics.port }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  tcpSocket: {port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{- define "corolla.modelMounts" -}}
- {name: cache, mountPath: /cache}
{{- if .Values.model.hub.existingSecret }}
- {name: hub, mountPath: /etc/corolla/hub, readOnly: true}
{{- end }}
{{- if .Values.model.volume.existingClaim }}
- {name: models, mountPath: {{ .Values.model.volume.path }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "corolla.modelVolumes" -}}
- name: cache
  {{- if .Values.model.cache.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .Values.model.cache.existingClaim }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .Values.model.cache.sizeLimit }}}
  {{- end }}
{{- with .Values.model.hub.existingSecret }}
- name: hub
  secret:
    secretName: {{ . }}
    # Only the pod's group may read it.
    defaultMode: 0440
    items: [{key: {{ $.Values.model.hub.tokenKey }}, path: token}]
{{- end }}
{{- with .Values.model.volume.existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- end }}

{{/* How an upgrade replaces pods; what another type leaves of the defaults the API would refuse. */}}
{{- define "corolla.strategy" -}}
strategy: {{- ternary . (omit . "rollingUpdate") (eq .type "RollingUpdate") | toYaml | nindent 2 }}
{{- end }}

{{/* How many pods may be away at a time by somebody's wish: dict "maxUnavailable" "replicas". */}}
{{- define "corolla.maxUnavailable" -}}
{{- if eq (toString .maxUnavailable) "" -}}
{{ ternary 1 0 (gt (int .replicas) 1) }}
{{- else -}}
{{ .maxUnavailable }}
{{- end -}}
{{- end }}

{{- define "corolla.budgetVersion" -}}
{{ ternary "policy/v1" "policy/v1beta1" (semverCompare ">=1.21.0-0" .Capabilities.KubeVersion.Version) }}
{{- end }}
