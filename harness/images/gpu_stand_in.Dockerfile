# Stands in for the trainer in tests of GPU scheduling: the nodes' GPUs exist only in the API. What a pod starts as
# `python -m grpo_trainer` holds what the pod was given until /tmp/finish appears or it is told to stop, and ends as the
# contract between operator and pod says.
ARG BASE_IMAGE=debian:bookworm-slim
FROM ${BASE_IMAGE}
RUN printf '%s\n' '#!/bin/sh' "trap 'exit 143' TERM" 'until [ -e /tmp/finish ]; do sleep 0.2; done' \
 'echo "{\"result\": \"Succeeded\", \"message\": \"held its GPUs to the end\"}" > /dev/termination-log' \
 > /usr/local/bin/python && chmod 755 /usr/local/bin/python
USER 65532:65532
