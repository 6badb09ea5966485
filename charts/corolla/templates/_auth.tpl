{{/* How callers are known: keys, oidc or none. */}}
{{- define "corolla.authMode" -}}
{{- $keys := .Values.client.apiKeys.existingSecret }}
{{- $mode := default (ternary "none" "keys" (empty $keys)) .Values.auth.mode }}
{{- if and (eq $mode "keys") (not $keys) }}
{{- fail "auth.mode is keys; set client.apiKeys.existingSecret to the Secret that holds the keys" }}
{{- end }}
{{- if and (eq $mode "none") $keys }}
{{- fail "auth.mode is none, but client.apiKeys.existingSecret names keys; remove one of the two" }}
{{- end }}
{{- if and (eq $mode "none") (ne .Values.client.service.type "ClusterIP") }}
{{- fail (printf "with client.service.type %s, everyone who can reach the cluster can use the model; set auth.mode to keys or oidc" .Values.client.service.type) }}
{{- end }}
{{- if eq $mode "oidc" }}
{{- $_ := required "auth.mode is oidc: name the issuer in auth.oidc.issuer" .Values.auth.oidc.issuer }}
{{- $_ := required "auth.mode is oidc: name what tokens are for in auth.oidc.audience" .Values.auth.oidc.audience }}
{{- if and .Values.auth.oidc.jwks .Values.auth.oidc.jwksSecret }}
{{- fail "auth.oidc.jwks and auth.oidc.jwksSecret both name the issuer's key set; remove one of them" }}
{{- end }}
{{- end }}
{{- $mode -}}
{{- end }}

{{- define "corolla.authSettings" -}}
{{- if .Values.client.apiKeys.existingSecret }}
COROLLA_API_KEYS_FILE: /etc/corolla/keys/{{ .Values.client.apiKeys.key }}
{{- end }}
{{- if eq (include "corolla.authMode" .) "oidc" }}
{{- with .Values.auth.oidc }}
COROLLA_OIDC_ISSUER: {{ .issuer | quote }}
COROLLA_OIDC_AUDIENCE: {{ .audience | quote }}
COROLLA_OIDC_TENANT_CLAIM: {{ .tenantClaim | quote }}
{{- if .jwksSecret }}
COROLLA_OIDC_JWKS: /etc/corolla/oidc-keys/{{ .jwksKey }}
{{- else if .jwks }}
COROLLA_OIDC_JWKS: {{ .jwks | quote }}
{{- end }}
{{- if .caSecret }}
COROLLA_OIDC_CA_FILE: /etc/corolla/oidc/ca.crt
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The issuer is outside; no policy can name it. Its description may name another place on the usual port. */}}
{{- define "corolla.authEgress" -}}
{{- if and (eq (include "corolla.authMode" .) "oidc") (not .Values.auth.oidc.jwksSecret) }}
{{- $ports := list 443 }}
{{- range compact (list .Values.auth.oidc.issuer .Values.auth.oidc.jwks) }}
{{- $ports = append $ports (regexFind ":[0-9]+$" (urlParse .).host | trimPrefix ":" | default 443 | int) }}
{{- end }}
{{- range uniq $ports }}
- ports: [{port: {{ . }}, protocol: TCP}]
{{- end }}
{{- end }}
{{- end }}
