{{- /* What the operator does in the namespaces that it serves. Its status writes go to the subresource only. */ -}}
{{- define "grpo-operator.rules" -}}
- apiGroups: [grpo.dev]
  resources: [grpojobs]
  verbs: [get, list, watch, delete] # delete: ttlSecondsAfterFinished
- apiGroups: [grpo.dev]
  resources: [grpojobs/status]
  verbs: [patch]
- apiGroups: [grpo.dev]
  resources: [grpojobs/finalizers] # owner references that block deletion
  verbs: [update]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [create, get, list, watch, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads] # of jobs with a queue name; patch: their queue, priority, and that a job is suspended
  verbs: [create, get, list, watch, patch, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status] # PodsReady, Finished, and what an eviction gives back
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, deletecollection] # deletecollection: a gang that hangs is ended whole
- apiGroups: [""]
  resources: [resourcequotas, serviceaccounts] # a gang whose pods would not be created is not admitted
  verbs: [list, watch]
- apiGroups: [""]
  resources: [services] # grpo-rendezvous; get, patch: one of ours that somebody changed is mended
  verbs: [create, get, list, patch, watch]
{{- if .Values.trainerPods.networkPolicy.enabled }}
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies] # mended in the same way
  resourceNames: [grpo-pods]
  verbs: [get, list, patch, watch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create]
{{- end }}
- apiGroups: [""]
  resources: [persistentvolumeclaims] # checkpoint.volumeClaimTemplate; get: whose a claim of that name is
  verbs: [create, get]
- apiGroups: [""]
  resources: [events]
  verbs: [create, list] # list: why pods are not created or don't start
{{- end -}}
