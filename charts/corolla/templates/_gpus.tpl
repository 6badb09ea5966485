{{/* Not empty where pods of a pool get their GPUs by a claim, and not by a resource that nodes count. */}}
{{- define "corolla.hasClaim" -}}
{{- if and .gpu.deviceClass (gt (int .gpu.count) 0) }}claim{{ end }}
{{- end }}

{{/* What the container of a pool asks for, GPUs included. */}}
{{- define "corolla.gpuResources" -}}
{{- if gt (int .gpu.count) 1 }}
{{- fail (printf "gpu.count is %d, and a block server computes on one GPU: the others would stand idle; set gpu.count=1 and raise replicas" (int .gpu.count)) }}
{{- end }}
{{- $asked := deepCopy .resources }}
{{- if include "corolla.hasClaim" . }}
{{- $_ := set $asked "claims" (list (dict "name" "gpu")) }}
{{- else if gt (int .gpu.count) 0 }}
{{- $asked = mergeOverwrite $asked (dict "limits" (dict .gpu.resource (int .gpu.count))) }}
{{- end }}
{{- toYaml $asked }}
{{- end }}

{{/* Kernels are compiled once for each kind of device; their folder outlasts the container. */}}
{{- define "corolla.gpuMounts" -}}
{{- if gt (int .gpu.count) 0 }}
- {name: kernels, mountPath: /kernels}
{{- end }}
{{- if .gpu.sharedMemory }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- end }}

{{- define "corolla.gpuVolumes" -}}
{{- if gt (int .gpu.count) 0 }}
- name: kernels
  {{- if .gpu.kernelCache.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .gpu.kernelCache.existingClaim }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .gpu.kernelCache.sizeLimit }}}
  {{- end }}
{{- end }}
{{- with .gpu.sharedMemory }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ . }}}
{{- end }}
{{- end }}

{{/* The API of claims that the cluster has; requests of the oldest one have no word `exactly`. Without a cluster, Helm
     takes it for one that has every API that Helm knows, so the version counts as well. */}}
{{- define "corolla.claimVersion" -}}
{{- $known := list }}
{{- range list "v1" "v1beta2" "v1beta1" }}
{{- $isRecent := semverCompare ">=1.32.0-0" $.Capabilities.KubeVersion.Version }}
{{- if and $isRecent ($.Capabilities.APIVersions.Has (printf "resource.k8s.io/%s" .)) }}
{{- $known = append $known . }}
{{- end }}
{{- end }}
{{- required "gpu.deviceClass needs a cluster with dynamic resource allocation (resource.k8s.io); set gpu.resource in its place" (first $known) -}}
{{- end }}
