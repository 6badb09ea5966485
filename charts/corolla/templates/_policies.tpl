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

{{/* Names are looked up, and the hub is asked where it may be. */}}
{{- define "corolla.hubEgress" -}}
{{- if not .Values.model.offline }}
- ports: [{port: 443, protocol: TCP}]
{{- end }}
{{- end }}
