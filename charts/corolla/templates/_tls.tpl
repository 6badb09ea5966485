{{/* Who makes the certificates: the chart's own "issuer", "certManager", or "secrets" for those that values name; empty
     without certificates. */}}
{{- define "corolla.tlsSource" -}}
{{- if not .Values.tls.enabled -}}
{{- else if .Values.tls.certManager.issuer -}}certManager
{{- else if compact (values .Values.tls.existingSecrets) -}}secrets
{{- else -}}issuer
{{- end -}}
{{- end }}

{{- define "corolla.usesIssuer" -}}
{{- if eq (include "corolla.tlsSource" .) "issuer" }}issuer{{ end }}
{{- end }}

{{/* The folder with a pod's certificate, which a process writes to that enrols at the issuer; empty without any. */}}
{{- define "corolla.tlsDir" -}}
{{- if include "corolla.usesIssuer" . -}}/run/corolla/tls
{{- else if .Values.tls.enabled -}}/etc/corolla/tls
{{- end -}}
{{- end }}

{{/* Pods that get their certificates in different ways do not trust each other, so a release stays as it was. Where it is
     only rendered, nobody knows what it was. */}}
{{- define "corolla.checkSwitch" -}}
{{- if and (include "corolla.usesIssuer" .) (not .Values.issuer.existingSecret) (not (lookup "v1" "Secret" .Release.Namespace "")) }}
{{- fail "this is rendered without a cluster, so no authority can be generated: create a Secret by `corolla tokens pods` and name it in issuer.existingSecret (docs/kubernetes.md), or set tls.enabled=false for a release that has no certificates" }}
{{- end }}
{{- if .Release.IsUpgrade }}
{{- with lookup "v1" "ConfigMap" .Release.Namespace (printf "%s-router" (include "corolla.fullname" .)) }}
{{- $had := default "" (get .data "COROLLA_TLS_DIR") }}
{{- if and (not $had) $.Values.tls.enabled }}
{{- fail (printf "release %s has no certificates, and pods with certificates do not speak with pods without; install a second release and move the callers to it (docs/kubernetes.md), or set tls.enabled=false" $.Release.Name) }}
{{- else if ne $had (include "corolla.tlsDir" $) }}
{{- fail (printf "release %s has certificates from elsewhere than these values name, or they name none, and its pods would not speak with new ones; leave `tls` as it was, or install a second release and move the callers to it" $.Release.Name) }}
{{- end }}
{{- end }}
{{- if and .Values.redis.enabled .Values.tls.enabled }}
{{- with lookup "apps/v1" "StatefulSet" .Release.Namespace (printf "%s-redis" (include "corolla.fullname" .)) }}
{{- if not (contains "--tls-port" (toJson .spec)) }}
{{- fail (printf "Redis of release %s has no certificate yet, and routers that run would not speak with one that has; install a second release and move the callers to it (docs/kubernetes.md)" $.Release.Name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The Secret with a pod's certificate: dict "root" "component". */}}
{{- define "corolla.tlsSecret" -}}
{{- $given := get .root.Values.tls.existingSecrets (ternary "blockServer" .component (eq .component "block-server")) -}}
{{- if $given -}}
{{ $given }}
{{- else if eq (include "corolla.tlsSource" .root) "certManager" -}}
{{ include "corolla.fullname" .root }}-{{ .component }}-tls
{{- else -}}
{{- fail (printf "tls.existingSecrets names no Secret for the kind of pod %s; name one for each kind, or an issuer in tls.certManager.issuer" .component) }}
{{- end -}}
{{- end }}

{{/* The Secret with the authority and the tokens of pods. */}}
{{- define "corolla.identities" -}}
{{ default (printf "%s-identities" (include "corolla.fullname" .)) .Values.issuer.existingSecret }}
{{- end }}

{{- define "corolla.tlsSettings" -}}
{{- with include "corolla.tlsDir" . }}
COROLLA_TLS_DIR: {{ . }}
{{- end }}
{{- if include "corolla.usesIssuer" . }}
COROLLA_ISSUER: {{ include "corolla.fullname" . }}-issuer:50054
COROLLA_JOIN_TOKEN_FILE: /etc/corolla/token/token
{{- end }}
{{- end }}

{{/* Where a container that shows a certificate finds it. */}}
{{- define "corolla.tlsMounts" -}}
{{- if include "corolla.usesIssuer" . }}
- {name: certificates, mountPath: /run/corolla}
{{- else if .Values.tls.enabled }}
- {name: tls, mountPath: /etc/corolla/tls, readOnly: true}
{{- end }}
{{- end }}

{{/* Where a container that enrols finds its token, too. */}}
{{- define "corolla.enrolmentMounts" -}}
{{- include "corolla.tlsMounts" . }}
{{- if include "corolla.usesIssuer" . }}
- {name: token, mountPath: /etc/corolla/token, readOnly: true}
{{- end }}
{{- end }}

{{/* A mounted Secret follows a renewed certificate, or another token. Keys that pods draw lie in memory.
     dict "root" "component". */}}
{{- define "corolla.tlsVolumes" -}}
{{- if include "corolla.usesIssuer" .root }}
- name: certificates
  emptyDir: {medium: Memory, sizeLimit: 4Mi}
- name: token
  secret:
    secretName: {{ include "corolla.identities" .root }}
    # Only the pod's group may read it, and no other role's.
    defaultMode: 0440
    items: [{key: {{ ternary "block" .component (eq .component "block-server") }}.token, path: token}]
{{- else if .root.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "corolla.tlsSecret" . }}
    # Only the pod's group may read it.
    defaultMode: 0440
{{- end }}
{{- end }}
