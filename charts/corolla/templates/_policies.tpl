{{/* Pods of this release by component: dict "root" "components". */}}
{{- define "corolla.peers" -}}
{{- range .components }}
- podSelector:
    matchLabels:
      {{- include "corolla.selector" $.root | nindent 6 }}
      app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{/* Who may read the metrics. */}}
{{- define "corolla.scrapeIngress" -}}
- ports: [{port: metrics, protocol: TCP}]
  {{- with .Values.networkPolicy.scrapers }}
  from: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* Pods enrol at the issuer. */}}
{{- define "corolla.issuerEgress" -}}
{{- if include "corolla.usesIssuer" . }}
- to: {{- include "corolla.peers" (dict "root" . "components" (list "issuer")) | nindent 4 }}
  ports: [{port: 50054, protocol: TCP}]
{{- end }}
{{- end }}

{{/* Names are looked up, and the hub is asked where it may be. */}}
{{- define "corolla.hubEgress" -}}
{{- if not .Values.model.offline }}
{{- $endpoint := urlParse (default "https://huggingface.co" .Values.model.hub.endpoint) }}
{{- $usual := ternary 80 443 (eq $endpoint.scheme "http") }}
{{- $port := regexFind ":[0-9]+$" $endpoint.host | trimPrefix ":" | default $usual | int }}
- ports: [{port: {{ $port }}, protocol: TCP}]
{{- end }}
{{- end }}

{{/* The collector of traces may be anywhere; no policy can name it. */}}
{{- define "corolla.tracingEgress" -}}
{{- with .Values.tracing.endpoint }}
{{- $endpoint := urlParse . }}
{{- $usual := ternary 443 80 (eq $endpoint.scheme "https") }}
- ports: [{port: {{ regexFind ":[0-9]+$" $endpoint.host | trimPrefix ":" | default $usual | int }}, protocol: TCP}]
{{- end }}
{{- end }}
