"""The KubeRay manifests: valid by the published CRDs, safe by our own rules, and naming code and configs that exist."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from ray.serve.schema import ServeDeploySchema

from citer_ray import __version__
from citer_ray.config import CiterConfig
from citer_ray.config_loading import load_config
from citer_ray.on_ray.serve_app import APP_NAME, app, load_app_config, with_serving_engine

ROOT = Path(__file__).parents[2]
MANIFESTS = {path.stem: path for path in (ROOT / "infra" / "kuberay").glob("*.yaml")}
RAY_MANIFESTS = ("raycluster", "rayjob-collect", "rayjob-iterate", "rayservice")
SERVE_CONFIGS = ("infra/kuberay/rayservice.yaml", "infra/serve/embedded.yaml")


@cache
def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load(MANIFESTS[name].read_text("utf-8"))


@cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    schemas = json.loads((ROOT / "tests" / "unit" / "crds" / "kuberay-v1.json").read_text("utf-8"))
    return jsonschema.Draft202012Validator(schemas["kinds"][kind] | {"$defs": schemas["$defs"]})


def cluster_of(name: str) -> dict[str, Any]:
    spec = manifest(name)["spec"]
    return spec.get("rayClusterSpec") or spec.get("rayClusterConfig") or spec


def pods(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    cluster = cluster_of(name)
    yield "head", cluster["headGroupSpec"]["template"]["spec"]
    for group in cluster["workerGroupSpecs"]:
        yield group["groupName"], group["template"]["spec"]


ALL_PODS = [pytest.param(name, group, pod, id=f"{name}-{group}") for name in RAY_MANIFESTS for group, pod in pods(name)]


def on_disk(path: str) -> Path:
    """Where the image's /app comes from."""
    return ROOT / Path(path).relative_to("/app")


def test_all_manifests_are_known() -> None:
    assert set(MANIFESTS) == {*RAY_MANIFESTS, "networkpolicy"}


@pytest.mark.parametrize("name", RAY_MANIFESTS)
def test_manifest_is_valid_by_the_crd(name: str) -> None:
    errors = validator(manifest(name)["kind"]).iter_errors(manifest(name))
    assert [f"{error.json_path}: {error.message}" for error in errors] == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.autoscalerOptions.idleTimeoutSecond", 60),
        ("spec.autoscalerOptions.version", "v3"),
        ("spec.gcsFaultToleranceOptions.redisPort", 6379),
        ("spec.headGroupSpec.template.spec.containers.0.securityContext.runAsNonroot", True),
        ("spec.workerGroupSpecs.1.maxReplicas", "four"),
        ("spec.workerGroupSpecs.0.template.spec.containers.0.env.0.valueForm", {}),
    ],
)
def test_the_schemas_find_mistakes(path: str, value: object) -> None:
    broken = json.loads(json.dumps(manifest("raycluster")))
    node: Any = broken
    *parents, last = path.split(".")
    for part in parents:
        node = node[int(part) if part.isdigit() else part]
    node[last] = value
    assert list(validator("RayCluster").iter_errors(broken))


@pytest.mark.parametrize("name", RAY_MANIFESTS)
def test_cluster(name: str) -> None:
    cluster = cluster_of(name)
    assert cluster["rayVersion"] == ray.__version__
    assert cluster["authOptions"] == {"mode": "token"}
    assert (cluster["enableInTreeAutoscaling"], cluster["autoscalerOptions"]["version"]) == (True, "v2")
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    assert set(groups) == {"cpu", "gpu"}
    for group in groups.values():
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] > 0


@pytest.mark.parametrize("name", ["raycluster", "rayservice"])
def test_lasting_clusters_outlive_their_head(name: str) -> None:
    options = cluster_of(name)["gcsFaultToleranceOptions"]
    assert options["redisAddress"]
    assert set(options["redisPassword"]["valueFrom"]) == {"secretKeyRef"}


@pytest.mark.parametrize(("name", "group", "pod"), ALL_PODS)
def test_pod(name: str, group: str, pod: dict[str, Any]) -> None:
    security = pod["securityContext"]
    assert security["runAsNonRoot"] is True and security["runAsUser"] == 1000
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert "restartPolicy" not in pod  # KubeRay refuses others than Never with the autoscaler v2
    if group != "head":  # the head's autoscaler talks to Kubernetes; nobody else does
        assert pod["automountServiceAccountToken"] is False
    (container,) = pod["containers"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    flavour = "gpu" if group == "gpu" else "cpu"
    assert container["image"] == f"citer-ray:{__version__}-{flavour}"
    assert container["resources"]["limits"] == container["resources"]["requests"]
    assert {"cpu", "memory"} <= set(container["resources"]["limits"])
    assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (group == "gpu")
    for probe in ("livenessProbe", "readinessProbe"):
        assert set(container[probe]) & {"httpGet", "exec"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize(("name", "group", "pod"), ALL_PODS)
def test_secrets_are_references(name: str, group: str, pod: dict[str, Any]) -> None:
    env = {entry["name"]: entry for entry in pod["containers"][0]["env"]}
    for key, entry in env.items():
        if re.search(r"KEY|TOKEN|PASSWORD|SECRET|USERNAME", key):
            assert entry["valueFrom"]["secretKeyRef"]["name"] == "citer-secrets", key
            assert "value" not in entry
    serves = name in ("raycluster", "rayservice")
    assert ("CITER_API_KEYS" in env) == serves
    if serves:  # without keys the API would be open: then no pod shall start
        assert "optional" not in env["CITER_API_KEYS"]["valueFrom"]["secretKeyRef"]


@pytest.mark.parametrize("name", ["rayjob-collect", "rayjob-iterate"])
def test_job_runs_a_script_and_a_configuration_that_fit_its_cluster(name: str) -> None:
    spec = manifest(name)["spec"]
    assert spec["shutdownAfterJobFinishes"] is True and spec["backoffLimit"] > 0
    assert "clusterSelector" not in spec  # KubeRay refuses it beside backoffLimit
    python, script, option, path, *overrides = shlex.split(spec["entrypoint"])
    assert (python, option) == ("python", "--config")
    assert on_disk(script) == ROOT / "jobs" / f"{name.removeprefix('rayjob-')}.py" and on_disk(script).is_file()
    config = load_config(on_disk(path), overrides)
    assert config.output_dir.startswith("/shared/")
    stages = [[config.collect.slm, config.collect.llm, config.collect.rollouts]]
    if name == "rayjob-iterate":
        stages.append([config.evaluate.workers])
        assert config.engine.kind == "transformers"  # evaluation decodes with it: both models on one GPU
        assert config.evaluate.workers.num_gpus <= 1
    for pools in stages:
        needs = [(pool.num_cpus, pool.num_gpus) for pool in pools for _ in range(pool.count)]
        assert_fits(name, needs)


def assert_fits(name: str, needs: list[tuple[float, float]]) -> None:
    """Actors fit the largest size of the GPU group: largest first, each into the first pod with room."""
    group = next(group for group in cluster_of(name)["workerGroupSpecs"] if group["groupName"] == "gpu")
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    free = [[float(limits["cpu"]), float(limits["nvidia.com/gpu"])] for _ in range(group["maxReplicas"])]
    for cpus, gpus in sorted(needs, key=lambda need: -need[1]):
        room = next((pod for pod in free if pod[0] >= cpus and pod[1] >= gpus - 1e-9), None)
        assert room is not None, f"no pod has {cpus} CPUs and {gpus} GPUs left"
        room[0] -= cpus
        room[1] -= gpus


def serve_config(file: str) -> ServeDeploySchema:
    document = yaml.safe_load((ROOT / file).read_text("utf-8"))
    text = document["spec"]["serveConfigV2"] if "spec" in document else None
    return ServeDeploySchema.model_validate(yaml.safe_load(text) if text else document)


def served(file: str) -> CiterConfig:
    (application,) = serve_config(file).applications
    arguments = application.args | {"config": str(on_disk(application.args["config"]))}
    return load_app_config(arguments)


@pytest.mark.parametrize("file", SERVE_CONFIGS)
def test_serve_config_names_our_application(file: str) -> None:
    (application,) = serve_config(file).applications
    assert (application.name, application.route_prefix) == (APP_NAME, "/")
    module, _, attribute = application.import_path.partition(":")
    assert getattr(importlib.import_module(module), attribute) is app
    config = served(file)
    assert config.serve.router == f"models:/{config.tracking.registered_model or config.name}@champion"
    assert config.output_dir.startswith("/shared/")


def test_service_fits_its_cluster_at_its_largest() -> None:
    serve = served("infra/kuberay/rayservice.yaml").serve
    for models in ((serve.slm.min_replicas, serve.llm.min_replicas), (serve.slm.max_replicas, serve.llm.max_replicas)):
        needs = [(serve.slm.num_cpus, serve.slm.num_gpus)] * models[0]
        needs += [(serve.llm.num_cpus, serve.llm.num_gpus)] * models[1]
        assert_fits("rayservice", needs)


def test_what_the_service_runs_on() -> None:
    config = with_serving_engine(served("infra/kuberay/rayservice.yaml"))
    assert config.engine.kind == "vllm" and config.serve.canary_router is None  # vLLM runs one router
    assert config.serve.llm.num_gpus == config.engine.llm.tensor_parallel_size
    assert with_serving_engine(served("infra/serve/embedded.yaml")).engine.kind == "transformers"


def test_the_router_in_service_is_of_the_job_beside_it() -> None:
    *_, path, output = shlex.split(manifest("rayjob-iterate")["spec"]["entrypoint"])
    config = served("infra/kuberay/rayservice.yaml")
    assert (config.name, f"output_dir={config.output_dir}") == (load_config(on_disk(path), []).name, output)


def test_network_policy_covers_the_ports() -> None:
    policy = manifest("networkpolicy")["spec"]
    assert policy["podSelector"] == {"matchLabels": {"ray.io/is-ray-node": "yes"}}
    anywhere = [rule for rule in policy["ingress"] if "from" not in rule]
    assert policy["policyTypes"] == ["Ingress"] and anywhere == []
    open_ports = {port["port"] for rule in policy["ingress"] for port in rule.get("ports", [])}
    assert open_ports == {8000, 8080, 8265}  # GCS and Ray Client stay among Ray's own pods
