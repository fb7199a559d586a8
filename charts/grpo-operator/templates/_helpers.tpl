{{- define "grpo-operator.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- /* A release may have dots in its name and begin with a digit, and a Service may not. */ -}}
{{- define "grpo-operator.fullname" -}}
{{- $name := include "grpo-operator.name" . -}}
{{- $release := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- $full := default $release .Values.fullnameOverride | replace "." "-" | trunc 50 | trimAll "-" -}}
{{- regexReplaceAll "^[0-9]" $full "grpo-${0}" -}}
{{- end -}}

{{- define "grpo-operator.selector" -}}
app.kubernetes.io/name: {{ include "grpo-operator.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "grpo-operator.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride -}}
{{- end -}}

{{- define "grpo-operator.labels" -}}
{{- include "grpo-operator.labels-with" (dict "root" . "labels" dict) -}}
{{- end -}}

{{- /* commonLabels, then `more`, then `own`: what selectors and uninstalling go by, nobody's value replaces. */ -}}
{{- define "grpo-operator.merge-labels" -}}
{{- toYaml (mergeOverwrite (dict) (.root.Values.commonLabels | default dict) (.more | default dict) .own) -}}
{{- end -}}

{{- /* The labels of an object that has some of its own. */ -}}
{{- define "grpo-operator.labels-with" -}}
{{- $root := .root -}}
{{- $own := dict
  "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_")
  "app.kubernetes.io/version" $root.Chart.AppVersion
  "app.kubernetes.io/part-of" "grpo-operator"
  "app.kubernetes.io/managed-by" $root.Release.Service -}}
{{- $selector := include "grpo-operator.selector" $root | fromYaml -}}
{{- include "grpo-operator.merge-labels" (dict "root" $root "more" .labels "own" (merge $own $selector)) -}}
{{- end -}}

{{- define "grpo-operator.pod-labels" -}}
{{- $selector := include "grpo-operator.selector" . | fromYaml -}}
{{- include "grpo-operator.merge-labels" (dict "root" . "more" .Values.podLabels "own" $selector) -}}
{{- end -}}

{{- define "grpo-operator.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "grpo-operator.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name: name the existing account, or set serviceAccount.create" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "grpo-operator.image" -}}
{{- if not (or .root.Values.imageRegistry (contains "/" .image.repository)) -}}
{{- fail "imageRegistry: no registry has these images. Build and push them (docs/how-to/operate/images.md), and set imageRegistry=<registry>/<project>. For images that are tagged localhost/… and loaded onto the nodes, set imageRegistry=localhost" -}}
{{- end -}}
{{- with .root.Values.imageRegistry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- printf "%s:%s" .image.repository (default .root.Chart.AppVersion .image.tag) -}}
{{- with .image.digest }}@{{ . }}{{ end -}}
{{- end -}}

{{- /* Policies with parameters are stable from Kubernetes 1.30 on. */ -}}
{{- define "grpo-operator.fenced" -}}
{{- with .Values.leaderElection -}}
{{- and .enabled .fence (semverCompare ">=1.30.0-0" $.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}

{{- /* Who may ask training pods how they are: the operator, and `monitoring`, as JSON. */ -}}
{{- define "grpo-operator.watchers" -}}
{{- $namespace := dict "matchLabels" (dict "kubernetes.io/metadata.name" (include "grpo-operator.namespace" .root)) -}}
{{- $pods := dict "matchLabels" (include "grpo-operator.selector" .root | fromYaml) -}}
{{- concat (list (dict "namespaceSelector" $namespace "podSelector" $pods)) (.monitoring | default list) | toJson -}}
{{- end -}}
