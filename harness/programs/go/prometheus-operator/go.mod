module grpo.dev/cluster/prometheus-operator

go 1.26.6

require github.com/prometheus-operator/prometheus-operator v0.94.0
