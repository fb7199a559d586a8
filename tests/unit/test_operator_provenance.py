"""What a pod gets to say what its model was made of: the key that signs it, and the name of its
image."""

from typing import Any

from grpo_api.job import parse_spec
from grpo_api.plan.plan import EarlierEnd
from grpo_api.text.contract import IMAGE_ENV, SIGNING_KEY
from grpo_operator.pods.manifests import attempt_of, plan_json, training_plan
from grpo_operator.pods.pod_spec import pod_spec
from grpo_operator.pods.roles import roles
from tests.unit.operator_world import PLAN, PODS, SPEC, active_status, make_job
from tests.unit.test_operator_milestones import end


def pod(**spec: Any) -> Any:
    return pod_spec("run", roles(parse_spec({**SPEC, **spec}), PLAN)[0], {}, PODS)


def test_the_signing_key_is_a_file_that_stays_and_no_variable() -> None:
    plain = pod()
    secret = {"name": "keys", "key": "signing.key"}
    signing = pod(export={"to": "None", "signingKeySecretRef": secret})
    (volume,) = (one for one in signing["volumes"] if one not in plain["volumes"])
    items = [{"key": "signing.key", "path": "key.pem"}]
    assert volume["secret"] == {"secretName": "keys", "items": items, "defaultMode": 0o440}
    (mount,) = (
        one for one in signing["containers"][0]["volumeMounts"] if one["name"] == volume["name"]
    )
    # a subPath isn't written anew when the Secret changes: what was a key at the start is one at
    # the end
    assert mount == {
        "name": volume["name"],
        "mountPath": SIGNING_KEY,
        "subPath": "key.pem",
        "readOnly": True,
    }
    assert signing["containers"][0]["env"] == plain["containers"][0]["env"]
    optional = pod(export={"to": "None", "signingKeySecretRef": secret | {"optional": True}})
    assert optional["volumes"][-1]["secret"]["optional"] is True


def test_the_pods_of_a_later_attempt_are_told_how_those_before_ended() -> None:
    known = make_job(status=active_status(ends=[end(1, "NodeLost"), end(2, "SchedulingTimeout")]))
    told = training_plan(attempt_of(known, parse_spec(SPEC), PLAN, 3)).ends
    assert told == [
        EarlierEnd(attempt=1, reason="NodeLost"),
        EarlierEnd(attempt=2, reason="SchedulingTimeout"),
    ]
    first = training_plan(attempt_of(make_job(), parse_spec(SPEC), PLAN, 1))
    assert '"ends"' not in plan_json(first)


def test_the_container_is_told_its_image() -> None:
    told = {one["name"]: one.get("value") for one in pod()["containers"][0]["env"]}
    assert told[IMAGE_ENV] == "trainer:1"
