{{/* A component's settings by name as COROLLA_* variables. JSON keeps large numbers from becoming powers of ten.
     Running calls get what the pod's grace leaves, but for a moment, and a component that nothing guards but the network
     policies may be so, unless the settings say otherwise: dict "root" "values" "isGuarded" "guards", and "usual" for
     what else holds unless they do. */}}
{{- define "corolla.settings" -}}
{{- $grace := sub .values.terminationGracePeriodSeconds (default 0 .values.preStopSeconds) | add -5 | max 0 | min 600 }}
{{- $usual := merge (dict "graceS" $grace) (default dict .usual) }}
{{- if not .isGuarded }}
{{- if not (or .root.Values.networkPolicy.enabled (hasKey .values.settings "insecure")) }}
{{- fail (printf "without networkPolicy.enabled and %s, the services accept calls from everyone who can reach a pod; set them, or insecure=true in the settings of block servers, router and client" .guards) }}
{{- end }}
{{- $_ := set $usual "insecure" true }}
{{- end }}
{{- range $name, $value := mergeOverwrite $usual (deepCopy .values.settings) }}
COROLLA_{{ snakecase $name | upper }}: {{ ternary $value (toJson $value) (kindIs "string" $value) | quote }}
{{- end }}
{{- end }}

{{/* Settings of every service. */}}
{{- define "corolla.commonSettings" -}}
COROLLA_METRICS_PORT: {{ .Values.metrics.port | quote }}
{{- if .Values.tracing.endpoint }}
OTEL_EXPORTER_OTLP_ENDPOINT: {{ .Values.tracing.endpoint | quote }}
OTEL_TRACES_SAMPLER: parentbased_traceidratio
OTEL_TRACES_SAMPLER_ARG: {{ .Values.tracing.sampleRatio | quote }}
{{- end }}
{{- end }}

{{/* What the collector is told of a pod, and wants to be told, where there is one. */}}
{{- define "corolla.tracingEnv" -}}
{{- if .Values.tracing.endpoint }}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.namespace.name={{ .Release.Namespace }},k8s.pod.name=$(POD_NAME)
{{- with .Values.tracing.headers }}
{{- if .existingSecret }}
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom: {secretKeyRef: {name: {{ .existingSecret }}, key: {{ .key }}}}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The type of weights, cache and wire. All pods of a release have the same, as a chain has one: that of GPUs if a pool
     asks for some, since `default_dtype` of the services gives a server with a GPU that type, too. */}}
{{- define "corolla.dtype" -}}
{{- $usual := "float32" -}}
{{- range $given := include "corolla.pools" . | fromYaml -}}
{{- $pool := include "corolla.pool" (dict "root" $ "pool" $given) | fromYaml -}}
{{- if gt (int $pool.gpu.count) 0 }}{{ $usual = "bfloat16" }}{{ end -}}
{{- end -}}
{{ default $usual .Values.model.dtype }}
{{- end }}

{{/* Settings of the model for block servers and client service, which must agree on it. */}}
{{- define "corolla.modelSettings" -}}
COROLLA_MODEL: {{ .Values.model.name | quote }}
{{- with .Values.model.revision }}
COROLLA_REVISION: {{ . | quote }}
{{- end }}
COROLLA_DTYPE: {{ include "corolla.dtype" . }}
COROLLA_QUANTIZATION: {{ .Values.model.quantization }}
COROLLA_KV_CACHE_DTYPE: {{ .Values.model.kvCacheDtype }}
COROLLA_ROUTER: {{ include "corolla.routerTarget" . }}
HF_HOME: /cache
{{- if .Values.model.offline }}
HF_HUB_OFFLINE: "1"
{{- end }}
{{- if .Values.model.hub.existingSecret }}
HF_TOKEN_PATH: /etc/corolla/hub/token
{{- end }}
{{- with .Values.model.hub.endpoint }}
HF_ENDPOINT: {{ . }}
{{- end }}
{{- end }}

{{/* What block servers call the model: its id, or the name of its folder; or that of its GGUF file, as the demo model is
     one, without what says that it is one of several parts. */}}
{{- define "corolla.modelName" -}}
{{- $name := .Values.model.name -}}
{{- if eq $name "demo" -}}
SmolLM2-135M-Instruct.Q4_1
{{- else if hasSuffix ".gguf" $name -}}
{{ regexReplaceAll "-[0-9]{5}-of-[0-9]{5}$" (base $name | trimSuffix ".gguf") "" }}
{{- else -}}
{{ ternary (base $name) $name (hasPrefix "/" $name) }}
{{- end -}}
{{- end }}

{{/* Where the file of quotas is, unless settings say otherwise. */}}
{{- define "corolla.usualQuotas" -}}
{{- if .Values.client.quotas -}}
quotasFile: /etc/corolla/quotas/quotas.json
{{- end -}}
{{- end }}

{{/* The only model that block servers may register. */}}
{{- define "corolla.expectedModels" -}}
{{ include "corolla.modelName" . }}{{ with int .Values.model.numBlocks }}={{ . }}{{ end }}
{{- end }}

{{/* Pools by name. The default stands here and not in values.yaml, where Helm would merge it with the given ones. */}}
{{- define "corolla.pools" -}}
{{- default (dict "main" dict) .Values.blockServer.pools | toYaml -}}
{{- end }}

{{/* A pool's values over the defaults: dict "root" "pool". */}}
{{- define "corolla.pool" -}}
{{- mergeOverwrite (deepCopy .root.Values.blockServer.defaults) (deepCopy (default dict .pool)) | toYaml -}}
{{- end }}
