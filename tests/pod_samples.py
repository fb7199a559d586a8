"""What users may and may not say about the pods: metadata, volumes, mounts, init containers,
affinity.

Part of tests/samples.py, in its notation: changes of its SPEC, and for each bad one the path and
what is said.
"""

from typing import Any

Changes = dict[str, Any]
_POD = "podTemplate.spec"
_SPEC_POD = f"spec.{_POD}"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_CLAIM = {"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}


def _volume(**kind: Any) -> Changes:
    return {f"{_POD}.volumes": [{"name": "more", **kind}]}


def _mount(path: str, **more: Any) -> Changes:
    """The claim `cache`, mounted there."""
    return {
        f"{_POD}.volumes": [_CLAIM],
        "volumeMounts": [{"name": "cache", "mountPath": path, **more}],
    }


def _init(**fields: Any) -> Changes:
    return {f"{_POD}.initContainers": [{"name": "fetch", "image": "fetch:1", **fields}]}


def _rights(**rights: Any) -> Changes:
    return _init(securityContext=rights)


_KINDS: dict[str, Any] = {
    "configMap": {
        "name": "c",
        "items": [{"key": "a", "path": "b/a", "mode": 256}],
        "defaultMode": 288,
    },
    "csi": {
        "driver": "secrets.csi.x",
        "volumeAttributes": {"a": "b"},
        "nodePublishSecretRef": {"name": "s"},
    },
    "downwardAPI": {
        "items": [
            {"path": "labels", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.labels"}},
            {
                "path": "cpu",
                "resourceFieldRef": {"containerName": "trainer", "resource": "limits.cpu"},
            },
        ],
    },
    "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"},
    "ephemeral": {
        "volumeClaimTemplate": {
            "metadata": {"labels": {"team": "rl"}, "annotations": {}},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": "fast",
                "volumeMode": "Filesystem",
                "resources": {"requests": {"storage": "10Gi"}},
            },
        },
    },
    "persistentVolumeClaim": {"claimName": "c", "readOnly": True},
    "projected": {
        "sources": [
            {"configMap": {"name": "c", "items": []}},
            {"secret": {"name": "s", "optional": True, "items": []}},
            {
                "downwardAPI": {
                    "items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]
                }
            },
        ],
    },
    "secret": {"secretName": "s", "items": [], "optional": True},
}

GOOD_PODS: dict[str, Changes] = {
    "metadata": {
        "podTemplate.metadata": {
            "labels": {"team": "rl", "app.kubernetes.io/part-of": "gsm8k"},
            "annotations": {"example.com/note": "größer"},
        },
    },
    **{f"volume-{kind.lower()}": _volume(**{kind: settings}) for kind, settings in _KINDS.items()},
    "mount": _mount("/mnt/more", subPath="a/b", readOnly=True),
    "mount-with-a-slash": _mount("/cache/"),
    "mount-beside-a-reserved-one": _mount("/modelsx"),
    "mount-deep-beside": _mount("/etc/grpox"),
    "shared-memory": {"sharedMemory": "8Gi"},
    "pod-settings": {
        _POD: {
            "serviceAccountName": "trainer",
            "imagePullSecrets": [{"name": "registry"}],
            "runtimeClassName": "nvidia",
            "schedulerName": "volcano",
            "terminationGracePeriodSeconds": 7,
            "hostNetwork": False,
            "dnsPolicy": "None",
            "dnsConfig": {
                "nameservers": ["10.0.0.10"],
                "searches": ["svc"],
                "options": [{"name": "ndots", "value": "2"}],
            },
        },
    },
    "init-container": {
        f"{_POD}.volumes": [_CLAIM],
        f"{_POD}.initContainers": [
            {
                "name": "fetch",
                "image": "fetch:1",
                "imagePullPolicy": "Always",
                "command": ["fetch"],
                "args": ["--all"],
                "workingDir": "/cache",
                "env": [{"name": "A", "value": "b"}],
                "envFrom": [{"secretRef": {"name": "s"}}],
                "resources": {"requests": {}, "limits": {"cpu": "1"}},
                "volumeMounts": [{"name": "cache", "mountPath": "/models"}],
                "restartPolicy": "Always",
                "securityContext": {
                    "runAsUser": 65532,
                    "runAsNonRoot": True,
                    "privileged": False,
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": False,
                    "capabilities": {"add": ["NET_BIND_SERVICE"], "drop": ["ALL"]},
                    "seccompProfile": {"type": "Localhost", "localhostProfile": "p.json"},
                    "appArmorProfile": {"type": "RuntimeDefault"},
                    "procMount": "Default",
                },
            },
        ],
    },
    "affinity": {
        f"{_POD}.affinity": {
            "nodeAffinity": {
                _REQUIRED: {
                    "nodeSelectorTerms": [
                        {
                            "matchExpressions": [
                                {"key": "zone", "operator": "In", "values": ["a"]}
                            ],
                            "matchFields": [
                                {"key": "metadata.name", "operator": "NotIn", "values": ["node-1"]}
                            ],
                        },
                    ],
                },
                _PREFERRED: [
                    {
                        "weight": 1,
                        "preference": {
                            "matchExpressions": [
                                {"key": "disk", "operator": "Exists", "values": []}
                            ],
                            "matchFields": [],
                        },
                    },
                ],
            },
            "podAntiAffinity": {
                _REQUIRED: [
                    {
                        "topologyKey": "zone",
                        "labelSelector": {"matchLabels": {"a": "b"}, "matchExpressions": []},
                        "namespaces": ["x"],
                    },
                ],
                _PREFERRED: [],
            },
        },
    },
}
"""Changes that must be accepted."""

_DIRTY = (
    "//models",
    "/./tmp",
    "/tmp/",
    "/",
    "///",
    "/data//x",
    "/dev/shm",
    "/etc",
    "/etc/grpo/.",
    "/rewards/0",
)

BAD_PODS: tuple[tuple[str, Changes, str, str], ...] = (
    ("old-overrides", {"podOverrides": {}}, "spec.podOverrides", "unknown field"),
    (
        "operators-label",
        {"podTemplate.metadata.labels": {"grpo.dev/attempt": "9"}},
        "spec.podTemplate.metadata",
        "another name",
    ),
    (
        "job-controllers-annotation",
        {"podTemplate.metadata.annotations": {"batch.kubernetes.io/job-completion-index": "9"}},
        "spec.podTemplate.metadata",
        "another name",
    ),
    (
        "managers-label",
        {"podTemplate.metadata.labels": {"app.kubernetes.io/managed-by": "me"}},
        "spec.podTemplate.metadata",
        "another name",
    ),
    *(
        (f"mount-{n}", _mount(path), "spec.volumeMounts[0]", "must lie outside")
        for n, path in enumerate(_DIRTY)
    ),
    ("mount-with-dots", _mount("/x/../models"), "spec.volumeMounts[0]", "must not contain"),
    (
        "mount-outside",
        _mount("/cache", subPath="../x"),
        "spec.volumeMounts[0]",
        "inside the volume",
    ),
    (
        "mount-of-nothing",
        {"volumeMounts": [{"name": "x", "mountPath": "/x"}]},
        "spec",
        "add the volume there",
    ),
    ("relative-mount", _mount("cache"), "spec.volumeMounts[0].mountPath", "match"),
    (
        "host-path",
        _volume(hostPath={"path": "/"}),
        f"{_SPEC_POD}.volumes[0]",
        "beyond the `restricted`",
    ),
    (
        "nfs",
        _volume(nfs={"server": "s", "path": "/"}),
        f"{_SPEC_POD}.volumes[0]",
        "beyond the `restricted`",
    ),
    ("other-kind", _volume(iscsi={"lun": 1}), f"{_SPEC_POD}.volumes[0].iscsi", "unknown field"),
    (
        "misspelt-kind",
        _volume(configmap={"name": "c"}),
        f"{_SPEC_POD}.volumes[0].configmap",
        "unknown field",
    ),
    ("no-kind", _volume(), f"{_SPEC_POD}.volumes[0]", "exactly one of configMap"),
    (
        "two-kinds",
        _volume(emptyDir={}, secret={"secretName": "s"}),
        f"{_SPEC_POD}.volumes[0]",
        "exactly one of",
    ),
    (
        "reserved-volume",
        {f"{_POD}.volumes": [_CLAIM | {"name": "plan"}]},
        f"{_SPEC_POD}.volumes[0]",
        "another name",
    ),
    (
        "reward-volume",
        {f"{_POD}.volumes": [_CLAIM | {"name": "reward-0"}]},
        f"{_SPEC_POD}.volumes[0]",
        "another name",
    ),
    (
        "same-volume-twice",
        {f"{_POD}.volumes": [_CLAIM, _CLAIM]},
        f"{_SPEC_POD}.volumes",
        "uplicate|more than one",
    ),
    (
        "file-outside",
        _volume(configMap={"name": "c", "items": [{"key": "k", "path": "a/../../b"}]}),
        f"{_SPEC_POD}.volumes[0].configMap.items[0]",
        "inside the volume",
    ),
    (
        "field-and-resource",
        _volume(downwardAPI={"items": [{"path": "a"}]}),
        f"{_SPEC_POD}.volumes[0].downwardAPI.items[0]",
        "exactly one of fieldRef",
    ),
    (
        "source-without-kind",
        _volume(projected={"sources": [{}]}),
        f"{_SPEC_POD}.volumes[0].projected.sources[0]",
        "exactly one of configMap",
    ),
    (
        "api-token",
        _volume(projected={"sources": [{"serviceAccountToken": {"path": "t"}}]}),
        f"{_SPEC_POD}.volumes[0].projected.sources[0].serviceAccountToken",
        "unknown field",
    ),
    ("host-network", {f"{_POD}.hostNetwork": True}, _SPEC_POD, "beyond the `restricted`"),
    ("host-pid", {f"{_POD}.hostPID": True}, _SPEC_POD, "beyond the `restricted`"),
    (
        "own-dns-without-servers",
        {f"{_POD}.dnsPolicy": "None"},
        _SPEC_POD,
        "needs dnsConfig.nameservers",
    ),
    ("hosts-dns", {f"{_POD}.dnsPolicy": "Default"}, f"{_SPEC_POD}.dnsPolicy", "ClusterFirst"),
    ("containers", {f"{_POD}.containers": []}, f"{_SPEC_POD}.containers", "unknown field"),
    (
        "pod-rights",
        {f"{_POD}.securityContext": {}},
        f"{_SPEC_POD}.securityContext",
        "unknown field",
    ),
    (
        "trainers-name",
        {f"{_POD}.initContainers": [{"name": "trainer", "image": "x"}]},
        f"{_SPEC_POD}.initContainers[0]",
        "another name",
    ),
    (
        "init-mount-of-nothing",
        _init(volumeMounts=[{"name": "x", "mountPath": "/x"}]),
        _SPEC_POD,
        "add the volume there",
    ),
    (
        "host-port",
        _init(ports=[{"hostPort": 80}]),
        f"{_SPEC_POD}.initContainers[0].ports",
        "unknown field",
    ),
    *(
        (
            f"rights-{name}",
            _rights(**rights),
            f"{_SPEC_POD}.initContainers[0].securityContext",
            says,
        )
        for name, rights, says in (
            ("privileged", {"privileged": True}, "neither privileged"),
            ("escalation", {"allowPrivilegeEscalation": True}, "neither privileged"),
            ("root", {"runAsUser": 0}, "no root"),
            ("maybe-root", {"runAsNonRoot": False}, "no root"),
            ("proc", {"procMount": "Unmasked"}, "procMount"),
            ("capability", {"capabilities": {"add": ["IPC_LOCK"]}}, "NET_BIND_SERVICE only"),
            ("few-dropped", {"capabilities": {"drop": ["NET_RAW"]}}, "drops ALL"),
            (
                "unconfined",
                {"seccompProfile": {"type": "Unconfined"}},
                "RuntimeDefault and Localhost",
            ),
            ("no-profile", {"appArmorProfile": {"type": "Localhost"}}, "needs localhostProfile"),
        )
    ),
    (
        "values-of-exists",
        {
            f"{_POD}.affinity.nodeAffinity.{_REQUIRED}.nodeSelectorTerms": [
                {"matchExpressions": [{"key": "a", "operator": "Exists", "values": ["b"]}]},
            ],
        },
        f"{_SPEC_POD}.affinity.nodeAffinity.{_REQUIRED}.nodeSelectorTerms[0].matchExpressions[0]",
        "take no values",
    ),
    (
        "greater-than-a-word",
        {
            f"{_POD}.affinity.nodeAffinity.{_REQUIRED}.nodeSelectorTerms": [
                {"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["b"]}]},
            ],
        },
        f"{_SPEC_POD}.affinity.nodeAffinity.{_REQUIRED}.nodeSelectorTerms[0].matchExpressions[0]",
        "one whole number",
    ),
    (
        "misspelt-affinity",
        {f"{_POD}.affinity.podAntiAffinity.{_REQUIRED}": [{"topologykey": "zone"}]},
        f"{_SPEC_POD}.affinity.podAntiAffinity.{_REQUIRED}[0].topologykey",
        "unknown field",
    ),
)
"""Name, changes, path and reason of what must be rejected."""
