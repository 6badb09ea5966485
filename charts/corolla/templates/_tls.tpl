{{/* The Secret with a pod's certificate: dict "root" "component" "given". */}}
{{- define "corolla.tlsSecret" -}}
{{- if .given -}}
{{ .given }}
{{- else -}}
{{- $_ := required "tls.enabled is true: name Secrets in tls.existingSecrets, or an issuer in tls.certManager.issuer" .root.Values.tls.certManager.issuer -}}
{{ include "corolla.fullname" .root }}-{{ .component }}-tls
{{- end -}}
{{- end }}

{{- define "corolla.tlsSettings" -}}
{{- if .Values.tls.enabled }}
COROLLA_TLS_DIR: /etc/corolla/tls
{{- end }}
{{- end }}

{{- define "corolla.tlsMounts" -}}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: /etc/corolla/tls, readOnly: true}
{{- end }}
{{- end }}

{{/* A mounted Secret follows a renewed one. dict "root" "component" "given". */}}
{{- define "corolla.tlsVolumes" -}}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "corolla.tlsSecret" . }}
    # Only the pod's group may read it.
    defaultMode: 0440
{{- end }}
{{- end }}
