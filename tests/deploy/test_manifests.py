"""The manifests of deploy/ that a cluster reads: their fields are published ones, and the commands in
them have settings, paths and versions that exist.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.scripts.scripts import cli as ray_commands

import configs
from cli.__main__ import SECTIONS
from cli.train import train
from configs import describe_estimate
from configs.estimate import estimate_run

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
HERE = Path(__file__).parent
PLACES = [*sorted(path for path in DEPLOY.iterdir()), ROOT / "docs/cluster.md"]
QUANTITY = r"[0-9]+(\.[0-9]+)?(m|[KMGT]i?)?"  # of Kubernetes
IMAGE_ROOT = "/opt/async-gigpo"


def as_schema(field: Any) -> dict[str, Any]:
    """Return the JSON Schema of a field in the notation of rayjob_fields.yaml."""
    if isinstance(field, list):
        return {"type": "array", "items": as_schema(field[0])}
    if isinstance(field, dict):
        names = {name.rstrip("!"): as_schema(inner) for name, inner in field.items()}
        others = names.pop("*", False)
        required = [name.rstrip("!") for name in field if name.endswith("!")]
        return {
            "type": "object",
            "properties": names,
            "required": required,
            "additionalProperties": others,
        }
    if field == "quantity":
        return {"type": "string", "pattern": f"^{QUANTITY}$"}
    kinds = field.split(", ")
    if set(kinds) <= {"string", "integer", "number", "boolean", "object", "array"}:
        return {"type": kinds}
    return {"enum": field.split("|")}


def faults(manifest: object, fields: dict[str, Any]) -> list[str]:
    found = jsonschema.Draft202012Validator(as_schema(fields)).iter_errors(manifest)
    return [f"{error.json_path}: {error.message}" for error in found]


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


RAYJOB = loaded(DEPLOY / "rayjob.yaml")
SKYPILOT = loaded(DEPLOY / "skypilot.yaml")
RAYJOB_FIELDS = loaded(HERE / "rayjob_fields.yaml")["job"]
SKYPILOT_FIELDS = loaded(HERE / "skypilot_fields.yaml")["task"]
HEAD = RAYJOB["spec"]["rayClusterSpec"]["headGroupSpec"]
GPU_GROUP, SPOT_GROUP = RAYJOB["spec"]["rayClusterSpec"]["workerGroupSpecs"]


def test_the_rayjob_has_published_fields_only() -> None:
    assert faults(RAYJOB, RAYJOB_FIELDS) == []


def test_the_skypilot_task_has_published_fields_only() -> None:
    assert faults(SKYPILOT, SKYPILOT_FIELDS) == []


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("spec.backoffLimits", 3, "'backoffLimits' was unexpected"),
        ("spec.backoffLimit", "3", "'3' is not of type 'integer'"),
        ("spec.rayClusterSpec.authOptions.mode", "tokens", "'tokens' is not one of"),
        ("spec.rayClusterSpec.headGroupSpec.rayStartParams.num-gpus", 0, "is not of type 'string'"),
        ("spec.rayClusterSpec.headGroupSpec.template.spec.containers", None, "is not of type"),
        ("kind", "RayCluster", "'RayCluster' is not one of ['RayJob']"),
    ],
)
def test_a_wrong_field_would_be_found(path: str, value: object, said: str) -> None:
    manifest = loaded(DEPLOY / "rayjob.yaml")
    *parents, name = path.split(".")
    place = manifest
    for parent in parents:
        place = place[parent]
    place[name] = value
    assert any(said in fault for fault in faults(manifest, RAYJOB_FIELDS))


def test_what_kuberay_checks_beyond_its_schema_holds() -> None:
    """ValidateRayJobSpec and ValidateRayJobMetadata of its validation.go, as far as we use them."""
    spec = RAYJOB["spec"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", RAYJOB["metadata"]["name"])
    assert spec["backoffLimit"] >= 0 and "clusterSelector" not in spec
    version = tuple(int(part) for part in spec["rayClusterSpec"]["rayVersion"].split("."))
    assert version >= (2, 52, 0), "token authentication needs it"
    # a retry is a new cluster, whose driver begins with an empty disk
    assert " --resume " in spec["entrypoint"] and " --trust" in spec["entrypoint"]


def test_all_pods_see_the_same_paths_and_have_the_same_image_and_user() -> None:
    """Check that model, checkout and data are under equal paths, as docs/operations.md asks."""
    head, gpus, spot = (group["template"]["spec"] for group in (HEAD, GPU_GROUP, SPOT_GROUP))
    for pod in (head, gpus, spot):
        assert pod["securityContext"]["runAsUser"] == 1000
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes
    for key in ("image", "env", "envFrom", "volumeMounts"):
        assert head["containers"][0][key] == gpus["containers"][0][key]
        assert head["containers"][0][key] == spot["containers"][0][key]
    docker = (DEPLOY / "Dockerfile").read_text()
    assert f"WORKDIR {IMAGE_ROOT}\n" in docker and "--uid 1000 gigpo" in docker
    paths = [mount["mountPath"] for mount in head["containers"][0]["volumeMounts"]]
    for name, value in (override.split("=") for override in given(RAYJOB["spec"]["entrypoint"])[1]):
        if value.startswith("/"):
            assert any(value.startswith(path + "/") for path in paths), name


def test_versions_are_those_of_this_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (pin,) = [line for line in project["dependencies"] if line.startswith("ray==")]
    version = pin.removeprefix("ray==")
    assert RAYJOB["spec"]["rayClusterSpec"]["rayVersion"] == version
    assert project["optional-dependencies"]["cluster"] == [f"ray[default]=={version}"]


def commands(text: str) -> list[list[str]]:
    """Return the words of every gigpo command in a file, without comments and continuations."""
    text = re.sub(r"\\\n\s*", " ", text)
    folded = r"(entrypoint: >-)\n((?:    .*\n)+)"
    text = re.sub(folded, lambda found: " ".join(found[2].split()) + "\n", text)
    names = "|".join(str(command.name) for command in sum(SECTIONS.values(), ()))
    # at the beginning of a line or of code, or behind `--`, variables or an image's name
    command = rf"(?:^|`|-- |gigpo:\w+ )\s*(?:[A-Z_]+=\S+ )*(gigpo (?:{names}) [^`|]*)"
    lines = [re.sub(r"^\s*[#$]?\s*", "", line) for line in text.splitlines()]
    found = [part for line in lines for part in re.findall(command, line)]
    submitted = re.findall(r"sbatch (?:--\S+ )*deploy/slurm.sbatch (configs/.*)", text)
    found += [f"gigpo train {rest}" for rest in submitted]
    return [shlex.split(part.rstrip("& "), comments=True)[1:] for part in found]


def given(entrypoint: str) -> tuple[str, list[str]]:
    """Return the config and the settings of a `gigpo train` command."""
    words = shlex.split(entrypoint)[2:]
    parameters = train.make_context("train", words).params
    return str(parameters["config"]), list(parameters["settings"])


ALL = [(path.name, words) for path in PLACES for words in commands(path.read_text())]


def test_the_commands_are_found() -> None:
    assert {name for name, _ in ALL} >= {
        "Dockerfile",
        "rayjob.yaml",
        "skypilot.yaml",
        "slurm.sbatch",
        "cluster.md",
    }
    assert commands("x: `gigpo train A b=1` or\n    gigpo stop \\\n  R  # a\n") == [
        ["train", "A", "b=1"],
        ["stop", "R"],
    ]


@pytest.mark.parametrize(("place", "words"), ALL, ids=[f"{n}-{' '.join(w)}" for n, w in ALL])
def test_a_command_has_options_and_settings_that_exist(place: str, words: list[str]) -> None:
    by_name = {str(command.name): command for command in sum(SECTIONS.values(), ())}
    if "..." in words:
        return
    context = by_name[words[0]].make_context(words[0], words[1:])
    settings = list(context.params.get("settings", ()))
    assert all("=" in setting or setting == "$@" for setting in settings), words
    config = context.params.get("config")
    if words[0] == "train" and config and not config.isupper() and "$" not in config:
        file = config.replace(f"{IMAGE_ROOT}/", "")
        assert (ROOT / file).is_file(), words
        configs.load(ROOT / file, [one for one in settings if "=" in one and "$" not in one])


@pytest.mark.parametrize(
    "entrypoint",
    [
        RAYJOB["spec"]["entrypoint"],
        "gigpo "
        + shlex.join(
            next(words for name, words in ALL if name == "skypilot.yaml" and words[0] == "train")
        ),
    ],
    ids=["rayjob", "skypilot"],
)
def test_the_eight_gpus_are_all_used_and_well_divided(entrypoint: str) -> None:
    file, settings = given(entrypoint)
    config = configs.load(ROOT / file.replace(f"{IMAGE_ROOT}/", ""), settings)
    assert configs.gpus_needed(config, learns=True) == 8
    limits = GPU_GROUP["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "8" and SKYPILOT["resources"]["accelerators"] == "H100:8"
    shown = describe_estimate(config)
    assert "does not fit" not in shown and "better" not in shown


def test_the_pods_that_come_and_go_have_room_for_the_workers_beyond_the_least() -> None:
    file, settings = given(RAYJOB["spec"]["entrypoint"])
    config = configs.load(ROOT / file.replace(f"{IMAGE_ROOT}/", ""), settings)
    n_beyond = configs.most_workers(config.actors) - configs.least_workers(config.actors)
    assert RAYJOB["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"]
    assert SPOT_GROUP["minReplicas"] == 0 and SPOT_GROUP["maxReplicas"] == n_beyond == 8
    (container,) = SPOT_GROUP["template"]["spec"]["containers"]
    assert float(container["resources"]["limits"]["nvidia.com/gpu"]) == (
        config.actors.gpus_per_worker
    )


def test_a_pod_that_goes_tells_ray_in_time() -> None:
    pod = SPOT_GROUP["template"]["spec"]
    *shell, line = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    drain, wait = line.split(" && ")
    assert shell == ["/bin/sh", "-c"] and wait == "sleep 30"
    words = shlex.split(drain)[1:]
    assert words[0] == "drain-node"
    given = ray_commands.commands["drain-node"].make_context(words[0], words[1:]).params
    assert (given["reason"], given["deadline_remaining_seconds"]) == (
        "DRAIN_NODE_REASON_PREEMPTION",
        30,
    )
    assert pod["terminationGracePeriodSeconds"] > 30


def test_the_example_of_engine_arguments_takes_the_gpus_that_the_page_says() -> None:
    text = (ROOT / "docs/cluster.md").read_text()
    (command,) = re.findall(r"^gigpo train CONFIG (.*pipeline_parallel_size=.*)$", text, re.M)
    config = configs.load(ROOT / "configs/alfworld_qwen2.5_1.5b.yaml", command.split())
    assert configs.gpus_needed(config, learns=True) == 8 and "These are eight GPUs" in text
    assert (config.actors.gpus_per_worker, config.learner.ranks) == (4, 4)
    configs.check_heads(config)


def test_the_stages_of_the_documentation_are_what_the_plan_says() -> None:
    text = (ROOT / "docs/cluster.md").read_text()
    alfworld = ROOT / "configs/alfworld_qwen2.5_1.5b.yaml"
    (plan,) = re.findall(r"```\n\$ gigpo train .*--plan\n(.*?)```", text, re.DOTALL)
    assert describe_estimate(configs.load(alfworld)).startswith(plan)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if re.match(r"\| (one GPU|2|8|64.*) \|", line)
    ]
    assert [row[0] for row in rows] == ["one GPU", "2", "8", "64", "64, larger batches"]
    for stage, lines, engine, learner, step, bottleneck in rows:
        settings = re.findall(r"[\w.]+=\S+(?=[ `])", lines)
        config = configs.load(alfworld, settings)
        assert configs.gpus_needed(config, learns=True) == (
            1 if stage == "one GPU" else int(stage.split(",")[0])
        )
        estimate = estimate_run(config)
        assert estimate.faults == [] and estimate.engine is not None
        shown = step.replace("2.9 s (23.3 s for 25,600)", "23.3 s")
        assert float(shown.removesuffix(" s")) == pytest.approx(estimate.step_s, rel=0.02)
        gib = (estimate.state_bytes + estimate.activation_bytes) / configs.GIB
        assert float(learner.split()[0]) == pytest.approx(gib, rel=0.02)
        waits = 1 - estimate.play_s / estimate.learn_s
        if "engines wait" in bottleneck:
            assert bottleneck == f"learner; engines wait {waits:.0%}".replace("%", " %")
        else:
            assert waits < 0
            requests = round(estimate.engine.requests)
            assert bottleneck == f"engines, with {requests} requests each"
        if engine != "the same":
            cache = float(re.findall(r"([\d.]+) GiB cache", engine)[0])
            assert cache == pytest.approx(estimate.engine.cache_bytes / configs.GIB, rel=0.02)
