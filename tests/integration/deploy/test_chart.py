"""The Helm chart: what it renders is valid, closed, and starts the services as they are."""

import asyncio
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cloud_node.settings import CloudSettings
from edge_node.settings import EdgeSettings
from end_node.settings import EndSettings
from models.data import read_sample
from scheduler.settings import SchedulerSettings
from tests.digits import write_digits
from tests.postgres import PostgresServer
from tierkit.access import read_book, read_token
from tierkit.client import AsyncClient, RunState
from tierkit.errors import SetupError
from tierkit.http.address import free_port
from tierkit.settings import ServiceSettings
from tierkit.testing import ServiceProcess, service_process, wait_for
from tierkit.wire.messages import checked_node_id
from training.host.settings import HostSettings

helm = pytest.importorskip("helm_python", reason="needs the extra `chart`: pip install '.[chart]'")
kubernetes = pytest.importorskip("kubernetes_validate", reason="needs the extra `chart`: pip install '.[chart]'")

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "helm" / "terrace"
RELEASE, NAMESPACE = "vision", "fleets"
NAME = "vision-terrace"
SETTINGS: dict[str, type[ServiceSettings]] = {
    "scheduler": SchedulerSettings,
    "end": EndSettings,
    "edge": EdgeSettings,
    "cloud": CloudSettings,
}
VERSIONS = ("1.25", "1.31", "1.37")
MATRIX: dict[str, dict[str, Any]] = {
    "defaults": {},
    "daemons by label": {
        "tiers": {
            "end": {"kind": "DaemonSet", "nodeSelector": {"example.com/tier": "end"}},
            "edge": {"kind": "DaemonSet", "nodeSelector": {"example.com/tier": "edge"}, "settings": {"threads": 2}},
            "cloud": {"enabled": False},
        }
    },
    "autoscaling": {
        "tiers": {tier: {"autoscaling": {"enabled": True, "maxReplicas": 9}} for tier in ("end", "edge", "cloud")}
    },
    "monitored": {
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    },
    "three schedulers, no volume": {
        "scheduler": {
            "replicas": 3,
            "database": {"existingSecret": "postgres"},
            "persistence": {"enabled": False},
        },
    },
    "own tokens, no volume": {
        "auth": {"existingSecret": "own-tokens"},
        "scheduler": {
            "persistence": {"enabled": False},
            "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        },
        "podMonitor": {"enabled": True},
    },
    "sites": {
        "auth": {"existingSecret": "own-tokens"},
        "scheduler": {"settings": {"share": ["cloud", "shop-2=none"]}},
        "tiers": {"end": {"enabled": False, "settings": {"threads": 1}}, "edge": {"enabled": False}},
        "sites": [
            {
                "name": "shop-1",
                "nodeSelector": {"example.com/shop": "shop-1"},
                "end": {"kind": "DaemonSet"},
                "edge": {"replicas": 2, "settings": {"drain_s": 5}},
            },
            {"name": "shop-2", "end": {"replicas": 3, "settings": {"threads": 2}}},
        ],
    },
    "training": {
        "training": {
            "enabled": True,
            "image": "registry.example/terrace-learn:1",
            "data": {"existingClaim": "2026"},
            "host": {"settings": {"epochs": 3, "drain_s": 5}},
            "worker": {"replicas": 3, "nodeSelector": {"example.com/idle": "yes"}},
        },
        "settings": {"log_level": "debug"},
    },
    "much": {
        "image": "registry.example/terrace:1",
        "imagePullSecrets": [{"name": "registry"}],
        "fullnameOverride": "f" * 40,
        "settings": {"log_level": "debug", "drain_s": 30.5},
        "scheduler": {
            "replicas": 2,
            "database": {"existingSecret": "postgres", "key": "terrace"},
            "settings": {"trusted": ["end", "edge", "cloud"], "max_body_bytes": 2147483648, "hedge": True},
            "persistence": {"size": "1.5Ti", "storageClassName": "fast"},
            "affinity": {"nodeAffinity": {}},
        },
        "tiers": {
            "cloud": {
                "image": "registry.example/terrace-gpu:1",
                "replicas": 3,
                "settings": {"provider": "cuda", "threads": 8, "drain_s": 60, "only_features": True},
                "resources": {"limits": {"nvidia.com/gpu": 1}},
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            }
        },
    },
}

(MATRIX["the page's"],) = (
    yaml.safe_load(example)
    for example in re.findall(
        r"^```yaml\n(.*?)^```$", (ROOT / "docs" / "how-to" / "kubernetes.md").read_text(), re.M | re.S
    )
    if example.startswith("scheduler:")
)

Manifest = dict[str, Any]


@cache
def chart() -> Any:
    helm.disable_logging()
    return helm.Chart.load(str(CHART))


def rendered(values: dict[str, Any], *, release: str = RELEASE) -> list[Manifest]:
    files = chart().render(values=values, name=release, namespace=NAMESPACE)
    return [
        manifest
        for name, text in files.items()
        if not name.endswith("NOTES.txt")
        for manifest in yaml.safe_load_all(text)
        if manifest
    ]


def jobs(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Specs of the pods of Jobs by what they run."""
    specs = [manifest["spec"]["template"]["spec"] for manifest in of_kind(manifests, "Job")]
    return {spec["containers"][0]["name"]: spec for spec in specs}


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest and manifest["kind"] in kinds]


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Specs of pods by the service that they run."""
    found = of_kind(manifests, "StatefulSet", "Deployment", "DaemonSet")
    specs = [manifest["spec"]["template"]["spec"] for manifest in found]
    return {spec["containers"][0]["name"]: spec for spec in specs}


@pytest.fixture(params=MATRIX)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return rendered(MATRIX[request.param])


def test_lint_finds_nothing() -> None:
    for values in MATRIX.values():
        report = helm.lint(str(CHART), values, strict=True)
        assert report["errors"] == []
        assert [each["error"] for each in report["messages"]] == ["icon is recommended"]


def test_the_chart_has_the_version_of_the_distribution() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart().metadata["version"], chart().metadata["appVersion"]) == (version, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_rendered_is_valid_in_old_and_new_clusters(manifests: list[Manifest], version: str) -> None:
    for manifest in manifests:
        if not manifest["apiVersion"].startswith("monitoring.coreos.com/"):
            kubernetes.validate(manifest, version, strict=True)


def test_containers_have_no_rights_and_probes_and_time_to_end(manifests: list[Manifest]) -> None:
    assert pods(manifests)
    for service, pod in pods(manifests).items():
        (container,) = pod["containers"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False  # TERRACE_SCHEDULER_PORT would be one of them
        rights = pod["securityContext"]
        assert (rights["runAsNonRoot"], rights["runAsUser"], rights["fsGroup"]) == (True, 10001, 10001)
        assert rights["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("liveness", "readiness")}
        assert probes == {
            "liveness": {"path": "/livez", "port": "http"},
            "readiness": {"path": "/readyz?standby=ok" if service == "scheduler" else "/readyz", "port": "http"},
        }
        drain_s = float(environment(container, service).get("drain_s", SETTINGS[service]().drain_s))
        assert drain_s + 10 <= pod["terminationGracePeriodSeconds"] <= drain_s + 20
    for account in of_kind(manifests, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def environment(container: Manifest, service: str) -> dict[str, str]:
    """Settings of a container; "" for what the cluster fills in."""
    prefix = f"TERRACE_{service.upper()}_"
    found = [(each["name"], each.get("value", "")) for each in container["env"]]
    assert len(dict(found)) == len(found), "a variable is there twice"
    return {name.removeprefix(prefix).lower(): value for name, value in found if name.startswith(prefix)}


def test_each_variable_is_a_setting_of_its_service(manifests: list[Manifest]) -> None:
    for service, pod in pods(manifests).items():
        (container,) = pod["containers"]
        assert container["args"] == [service]
        assert set(environment(container, service)) <= set(SETTINGS[service].model_fields)
        strange = {each["name"] for each in container["env"]} - {"POD_IP", "MACHINE"}
        assert all(name.startswith(f"TERRACE_{service.upper()}_") for name in strange)


def test_settings_are_written_as_services_read_them() -> None:
    pod = pods(rendered(MATRIX["much"]))["scheduler"]
    said = environment(pod["containers"][0], "scheduler")
    settings = SchedulerSettings.model_validate(said)
    assert (settings.max_body_bytes, settings.drain_s, settings.hedge) == (2**31, 30.5, True)
    assert settings.trusted == ("end", "edge", "cloud")


def test_a_setting_of_a_service_goes_before_one_of_all() -> None:
    values = {"settings": {"drain_s": 20}, "tiers": {"edge": {"settings": {"drain_s": 0}}}}
    found = pods(rendered(values))
    grace = {service: pod["terminationGracePeriodSeconds"] for service, pod in found.items()}
    assert grace == {"scheduler": 35, "end": 35, "cloud": 35, "edge": 15}
    assert environment(found["edge"]["containers"][0], "edge")["drain_s"] == "0"


def test_a_node_computes_on_the_cores_that_it_requests_where_it_requests_any() -> None:
    def source(resources: Manifest) -> str | None:
        pod = pods(rendered({"tiers": {"edge": {"resources": resources}}}))["edge"]
        found = {each["name"]: each.get("valueFrom", {}) for each in pod["containers"][0]["env"]}
        threads = found.get("TERRACE_EDGE_THREADS")
        return None if threads is None else str(threads["resourceFieldRef"]["resource"])

    assert source({"requests": {"cpu": "3"}}) == "requests.cpu"
    # The cluster takes a limit for the request where there is none.
    assert source({"requests": None, "limits": {"cpu": "500m"}}) == "requests.cpu"
    # It would be told 0.
    assert source({"requests": {"cpu": None}}) is None
    pod = pods(rendered({"tiers": {"edge": {"settings": {"threads": 2}}}}))["edge"]
    assert environment(pod["containers"][0], "edge")["threads"] == "2"


def test_names_fit_whatever_the_release_is_called() -> None:
    for release in ("a", "terrace", "x" * 53):
        for manifest in rendered({"tiers": {"edge": {"autoscaling": {"enabled": True}}}}, release=release):
            name = manifest["metadata"]["name"]
            if manifest["kind"] == "Deployment":
                checked_node_id(f"{name}-7d4b9c6f8d-x2k9p")
            assert len(name) <= 52
            assert release[:40] in name


def test_what_belongs_together_has_the_same_labels(manifests: list[Manifest]) -> None:
    workloads = of_kind(manifests, "StatefulSet", "Deployment", "DaemonSet")
    labels = [manifest["spec"]["template"]["metadata"]["labels"] for manifest in workloads]
    for manifest, own in zip(workloads, labels, strict=True):
        chosen = manifest["spec"]["selector"]["matchLabels"].items()
        assert [chosen <= each.items() for each in labels].count(True) == 1
        assert chosen <= own.items()
    services = [each for each in of_kind(manifests, "Service") if each["metadata"]["name"] != f"{NAME}-training"]
    everybody, *each = services
    assert [everybody["spec"]["selector"].items() <= own.items() for own in labels].count(True) == 1
    (schedulers,) = of_kind(manifests, "StatefulSet")
    name, replicas = schedulers["metadata"]["name"], schedulers["spec"]["replicas"]
    assert (everybody["metadata"]["name"], schedulers["spec"]["serviceName"]) == (name, name)
    selectors = [service["spec"]["selector"] for service in each]
    if replicas > 1:
        by_pod = {"statefulset.kubernetes.io/pod-name"}
        assert [selector.keys() - everybody["spec"]["selector"].keys() for selector in selectors] == [by_pod] * replicas
        assert [service["metadata"]["name"] for service in each] == [f"{name}-{number}" for number in range(replicas)]
    # Heartbeats reach a scheduler that is not ready, and nodes look for it under the name of its service.
    assert all(service["spec"]["publishNotReadyAddresses"] is True for service in (everybody, *each))
    urls = [
        f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}" for service in each or [everybody]
    ]
    for tier, pod in pods(manifests).items():
        if tier != "scheduler":
            said = environment(pod["containers"][0], tier)["scheduler"]
            assert SETTINGS[tier].model_validate({"scheduler": said}).scheduler == tuple(urls)  # type: ignore[attr-defined]


def test_a_run_has_a_host_and_workers_that_end_with_it() -> None:
    manifests = rendered(MATRIX["training"])
    found = jobs(manifests)
    host, worker = found["host"]["containers"][0], found["worker"]["containers"][0]
    for pod in found.values():
        assert pod["restartPolicy"] == "OnFailure"
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["image"] == "registry.example/terrace-learn:1"
    said = environment(host, "host")
    assert set(said) <= set(HostSettings.model_fields)
    settings = HostSettings.model_validate(said)
    assert (settings.workers, settings.epochs, settings.log_level, settings.share_data) == (3, 3, "debug", True)
    (service,) = [each for each in of_kind(manifests, "Service") if each["metadata"]["name"] == f"{NAME}-training"]
    port = service["spec"]["ports"][0]["port"]
    assert settings.advertise_url == (f"http://{NAME}-training:{port}",)
    assert port == host["ports"][0]["containerPort"]
    assert settings.scheduler is not None
    assert f"--scheduler={','.join(settings.scheduler)}" in worker["args"]
    assert "ports" not in worker
    (of_workers,) = [each for each in of_kind(manifests, "Job") if "worker" in each["metadata"]["name"]]
    assert (of_workers["spec"]["parallelism"], of_workers["spec"]["completions"]) == (3, 3)


def test_a_changed_run_is_another_job_in_another_folder() -> None:
    def of(values: dict[str, Any]) -> tuple[set[str], str]:
        manifests = rendered(values)
        names = {each["metadata"]["name"] for each in of_kind(manifests, "Job")}
        return names, environment(jobs(manifests)["host"]["containers"][0], "host")["folder"]

    names, folder = of(MATRIX["training"])
    assert of(MATRIX["training"]) == (names, folder)
    changed = {"training": MATRIX["training"]["training"] | {"strategy": "diloco"}}
    others, another = of(changed)
    assert not names & others
    assert folder != another


def test_a_run_without_images_is_refused_with_a_sentence() -> None:
    with pytest.raises(helm.HelmRenderError, match="name the claim of a volume that holds the images"):
        rendered({"training": {"enabled": True}})
    assert of_kind(rendered({}), "Job") == []


def test_a_site_has_workloads_of_its_own_with_the_values_of_the_tier() -> None:
    found = of_kind(rendered(MATRIX["sites"]), "Deployment", "DaemonSet")
    about = {each["metadata"]["name"].removeprefix(f"{NAME}-"): each for each in found}
    assert {name: each["kind"] for name, each in about.items()} == {
        "cloud": "Deployment",
        "end-shop-1": "DaemonSet",
        "edge-shop-1": "Deployment",
        "end-shop-2": "Deployment",
    }
    settings = {}
    for name, each in about.items():
        (container,) = each["spec"]["template"]["spec"]["containers"]
        settings[name] = environment(container, container["name"])
    sites = {name: each.get("site") for name, each in settings.items()}
    assert sites == {"cloud": None, "end-shop-1": "shop-1", "edge-shop-1": "shop-1", "end-shop-2": "shop-2"}
    assert [settings[name].get("threads") for name in ("end-shop-1", "end-shop-2")] == ["1", "2"]
    assert settings["edge-shop-1"]["drain_s"] == "5"
    assert [about[name]["spec"].get("replicas") for name in about] == [1, 2, None, 3]
    selectors = {name: each["spec"]["template"]["spec"].get("nodeSelector") for name, each in about.items()}
    in_shop_1 = {"example.com/shop": "shop-1"}
    assert selectors == {"cloud": None, "end-shop-1": in_shop_1, "edge-shop-1": in_shop_1, "end-shop-2": None}
    share = environment(pods(rendered(MATRIX["sites"]))["scheduler"]["containers"][0], "scheduler")["share"]
    assert SchedulerSettings.model_validate({"share": share}).share == ("cloud", "shop-2=none")


def test_pods_of_a_site_get_its_token_from_a_secret_of_the_users_and_else_that_of_their_tier() -> None:
    def keys(values: dict[str, Any]) -> dict[str, str]:
        found = {}
        for each in of_kind(rendered(values), "Deployment", "DaemonSet"):
            (secret,) = [one["secret"] for one in each["spec"]["template"]["spec"]["volumes"] if "secret" in one]
            found[each["metadata"]["name"].removeprefix(f"{NAME}-")] = secret["items"][0]["key"]
        return found

    assert keys(MATRIX["sites"]) == {
        "cloud": "cloud.token",
        "end-shop-1": "shop-1.token",
        "edge-shop-1": "shop-1.token",
        "end-shop-2": "shop-2.token",
    }
    assert set(keys(MATRIX["sites"] | {"auth": {}}).values()) == {"cloud.token", "edge.token", "end.token"}


def test_a_site_that_cannot_be_is_refused_with_a_sentence() -> None:
    end: dict[str, Any] = {"end": {}}
    for sites, words in (
        ([{"name": "a", **end}, {"name": "a", **end}], "there are two called a"),
        ([{"name": "a"}], "a has no nodes: name end, edge or cloud in it"),
        ([{"name": "s" * 30, **end}], "shorten the name of the site or fullnameOverride"),
    ):
        with pytest.raises(helm.HelmRenderError, match=words):
            rendered({"sites": sites})


def test_there_is_one_scheduler_on_a_volume_of_its_own() -> None:
    (scheduler,) = of_kind(rendered({}), "StatefulSet")
    assert scheduler["spec"]["replicas"] == 1
    (claim,) = scheduler["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert "database" not in environment(pods(rendered({}))["scheduler"]["containers"][0], "scheduler")
    assert of_kind(rendered({}), "PodDisruptionBudget") == []


def test_several_schedulers_share_a_database_and_are_replaced_one_after_the_other() -> None:
    manifests = rendered(MATRIX["much"])
    found = {each["name"]: each for each in pods(manifests)["scheduler"]["containers"][0]["env"]}
    source = found["TERRACE_SCHEDULER_DATABASE"]["valueFrom"]["secretKeyRef"]
    assert source == {"name": "postgres", "key": "terrace"}
    (budget,) = of_kind(manifests, "PodDisruptionBudget")
    (schedulers,) = of_kind(manifests, "StatefulSet")
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["selector"] == schedulers["spec"]["selector"]
    assert "updateStrategy" not in schedulers["spec"]  # RollingUpdate, which waits for readiness


def test_several_schedulers_without_a_database_are_refused_with_a_sentence() -> None:
    with pytest.raises(helm.HelmRenderError, match="several schedulers need a database that they share"):
        rendered({"scheduler": {"replicas": 2}})


def test_a_queue_makes_more_nodes() -> None:
    manifests = rendered(MATRIX["autoscaling"])
    scalers = of_kind(manifests, "HorizontalPodAutoscaler")
    assert len(scalers) == 3
    for scaler in scalers:
        (metric,) = scaler["spec"]["metrics"]
        # That the scheduler measures it, a test of the metrics shows.
        assert metric["external"]["metric"]["name"] == "terrace_scheduler_waiting_tasks"
        assert (
            f"| `{metric['external']['metric']['name']}` |" in (ROOT / "docs" / "reference" / "metrics.md").read_text()
        )
    # With a number of their own, each `helm upgrade` would undo what the autoscaler did.
    assert all("replicas" not in manifest["spec"] for manifest in of_kind(manifests, "Deployment"))


@pytest.mark.parametrize(
    "values",
    [
        {"unknown": 1},
        {"tiers": {"fog": {}}},
        {"tiers": {"end": {"kind": "StatefulSet"}}},
        {"tiers": {"end": {"settings": {"token": "secret"}}}},
        {"scheduler": {"settings": {"port": 1}}},
        {"scheduler": {"settings": {"database": "postgresql+asyncpg://terrace:public@db/terrace"}}},
        {"scheduler": {"replicas": 0}},
        {"scheduler": {"database": {"existingSecret": "postgres", "key": ""}}},
        {"scheduler": {"settings": {"nested": {}}}},
        {"scheduler": {"persistence": {"size": "much"}}},
        {"tiers": {"end": {"kind": "DaemonSet", "autoscaling": {"enabled": True}}}},
        {"tiers": {"end": {"settings": {"site": "shop-1"}}}},
        {"sites": [{"name": "Shop 1", "end": {}}]},
        {"sites": [{"end": {}}]},
        {"training": {"enabled": True, "data": {"existingClaim": "x"}, "host": {"settings": {"network": "y"}}}},
        {"training": {"enabled": True, "data": {"existingClaim": "x"}, "worker": {"replicas": 0}}},
        {"sites": [{"name": "shop-1", "end": {"autoscaling": {"enabled": True}}}]},
    ],
    ids=str,
)
def test_values_that_mean_nothing_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises((helm.HelmValuesError, helm.HelmRenderError)):
        rendered(values)


def test_prometheus_gets_the_same_rules_and_a_token() -> None:
    manifests = rendered(MATRIX["monitored"])
    (rule,) = of_kind(manifests, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())
    (monitor,) = of_kind(manifests, "PodMonitor")
    assert set(monitor["spec"]) == {"selector", "podTargetLabels", "podMetricsEndpoints"}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for manifest in of_kind(manifests, "StatefulSet", "Deployment"):
        template = manifest["spec"]["template"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        assert endpoint["port"] in {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    (secret,) = of_kind(manifests, "Secret")
    credentials = endpoint["authorization"]["credentials"]
    assert credentials["name"] == secret["metadata"]["name"]
    assert credentials["key"] in secret["stringData"]
    for made in (rule, monitor):
        assert made["metadata"]["labels"]["release"] == "prometheus"


def test_a_package_of_the_chart_holds_the_rules_themselves(tmp_path: Path) -> None:
    """In the checkout they are a link out of the chart."""
    package = Path(helm.package(str(CHART), destination=str(tmp_path)))
    with helm.Chart.load(str(package)) as packed:
        files = packed.render(values=MATRIX["monitored"], name=RELEASE, namespace=NAMESPACE)
    made = of_kind(list(yaml.safe_load_all(files["terrace/templates/monitoring.yaml"])), "PrometheusRule")
    assert made == of_kind(rendered(MATRIX["monitored"]), "PrometheusRule")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
def test_promtool_takes_the_rules_of_the_cluster(tmp_path: Path) -> None:
    (rule,) = of_kind(rendered(MATRIX["monitored"]), "PrometheusRule")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))
    done = subprocess.run(["promtool", "check", "rules", "rules.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_pods_get_the_files_of_the_secret_that_are_for_them(tmp_path: Path) -> None:
    manifests = rendered(MATRIX["daemons by label"] | {"tiers": {}})
    (secret,) = of_kind(manifests, "Secret")
    held = secret["stringData"]
    mounted = {}
    for service, pod in pods(manifests).items():
        (volume,) = [each["secret"] for each in pod["volumes"] if "secret" in each]
        assert volume["secretName"] == secret["metadata"]["name"]
        mounted[service] = {item["key"] for item in volume["items"]}
        assert mounted[service] <= set(held)
        names = environment(pod["containers"][0], service)
        assert {Path(names[name]).name for name in ("tokens", "token_file") if name in names} == mounted[service]
    # A node that is broken into has its own token alone.
    tiers = ("end", "edge", "cloud")
    assert mounted == {"scheduler": {"tokens.toml"}} | {
        tier: {f"{tier}.token", "metrics-tokens.toml"} for tier in tiers
    }

    def book(name: str) -> dict[str, Any]:
        path = tmp_path / name
        path.touch(mode=0o600)
        path.write_text(held[name])
        return {entry.sha256: entry for entry in read_book(path)}

    scheduler, of_nodes = book("tokens.toml"), book("metrics-tokens.toml")
    digests = {name: hashlib.sha256(held[name].encode()).hexdigest() for name in held if name.endswith(".token")}
    assert set(scheduler) == set(digests.values())
    assert set(of_nodes) == {digests["metrics.token"]}
    for tier in tiers:
        entry = scheduler[digests[f"{tier}.token"]]
        assert (entry.role, entry.tiers) == ("node", (tier,))
        assert entry.may_take(f"{NAME}-{tier}-7d4b9c6f8d-x2k9p")
        assert not entry.may_take(f"{NAME}-other-1")


def test_tokens_are_made_anew_for_each_fleet() -> None:
    (one,), (other,) = (of_kind(rendered({}), "Secret") for _ in range(2))
    assert not set(one["stringData"].values()) & set(other["stringData"].values())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
@pytest.mark.parametrize(("mode", "accepted"), [(0o440, True), (0o400, False), (0o444, False), (0o460, False)])
def test_a_file_of_a_secret_as_a_kubelet_makes_it_is_accepted(tmp_path_factory: Any, mode: int, accepted: bool) -> None:
    """Root's, with `fsGroup` as its group: 0400 could not be read, and 0444 is everybody's."""
    (volume,) = [each["secret"] for each in pods(rendered({}))["edge"]["volumes"] if "secret" in each]
    assert volume["defaultMode"] == 0o440
    folder = tmp_path_factory.mktemp("secret")
    folder.chmod(0o755)
    path = folder / "edge.token"
    path.write_text("terrace_" + "x" * 43)
    os.chown(path, 0, 10001)
    path.chmod(mode)
    root = os.open(folder, os.O_RDONLY)  # the way to it is root's alone
    here, groups = os.open(".", os.O_RDONLY), os.getgroups()
    os.fchdir(root)
    os.setgroups([10001])
    os.setegid(10001)
    os.seteuid(10001)
    try:
        if accepted:
            assert read_token(Path("edge.token")).startswith("terrace_")
        else:
            with pytest.raises(SetupError):
                read_token(Path("edge.token"))
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
        os.fchdir(here)
        os.close(here)
        os.close(root)


# --- the services, started as a kubelet would ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fleet:
    services: dict[str, ServiceProcess]
    secret: dict[str, str]

    def http(self, token: str) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self.secret[token]}"}
        return httpx.AsyncClient(headers=headers, trust_env=False, timeout=20)


def started_by_kubelet(
    pod: Manifest, name: str, *, folder: Path, secret: dict[str, str], hosts: dict[str, str], port: int
) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a container, with its volumes as folders.

    Args:
        secret: what the Secrets of the namespace hold.
        hosts: URLs by those that the cluster resolves.
    """
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    places = {}
    for mount in container["volumeMounts"]:
        place = folder / name / mount["name"]
        place.mkdir(parents=True)
        places[mount["mountPath"]] = str(place)
        for item in volumes.get(mount["name"], {}).get("secret", {}).get("items", ()):
            path = place / item["path"]
            path.touch(mode=0o600)
            path.write_text(secret[item["key"]])
    fields = {"status.podIP": "127.0.0.1", "metadata.name": f"{NAME}-{name}-abc", "spec.nodeName": "machine-1"}
    known: dict[str, str] = {}
    own = str(container["ports"][0]["containerPort"]) if "ports" in container else ""

    def here(value: str) -> str:
        """With what this machine has instead of variables, volumes, names and the container's port."""
        value = re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], value)
        flag, sign, rest = value.partition("=") if value.startswith("--") else ("", "", value)
        path = next((path for path in places if f"{rest}/".startswith(f"{path}/")), "")
        rest = places.get(path, "") + rest.removeprefix(path)
        for host, address in hosts.items():
            rest = rest.replace(host, address)
        return flag + sign + (rest.replace(own, str(port)) if own else rest)

    for each in container["env"]:
        source = each.get("valueFrom", {})
        if "resourceFieldRef" in source:
            kind, _, what = source["resourceFieldRef"]["resource"].partition(".")
            value = container["resources"][kind][what]
        elif "fieldRef" in source:
            value = fields[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            value = secret[source["secretKeyRef"]["key"]]
        else:
            value = each["value"]
        known[each["name"]] = here(value)
    return ["-m", "terrace", *map(here, container["args"])], known


@asynccontextmanager
async def started(values: dict[str, Any], folder: Path, secret: dict[str, str]) -> AsyncIterator[Fleet]:
    """Each container once, that of the scheduler as often as it has replicas.

    Args:
        secret: what the Secrets that the chart does not make hold.
    """
    manifests = rendered(values)
    (made,), (schedulers,) = of_kind(manifests, "Secret"), of_kind(manifests, "StatefulSet")
    secret = made["stringData"] | secret
    each = pods(manifests)
    each |= {f"scheduler-{number}": each["scheduler"] for number in range(schedulers["spec"]["replicas"])}
    del each["scheduler"]
    ports = {name: free_port() for name in each}
    names = [name for name in each if name.startswith("scheduler-")]
    hosts = {f"http://{NAME}-{name}:8070": f"http://127.0.0.1:{ports[name]}" for name in names}
    hosts |= {f"http://{NAME}-scheduler:8070": f"http://127.0.0.1:{ports['scheduler-0']}"}
    services: dict[str, ServiceProcess] = {}
    async with AsyncExitStack() as stack:
        for name, pod in sorted(each.items(), key=lambda each: each[0] not in names):
            command, variables = started_by_kubelet(
                pod, name, folder=folder, secret=secret, hosts=hosts, port=ports[name]
            )
            services[name] = await stack.enter_async_context(
                service_process(command, ready_file=folder / f"{name}.ready", environment=variables)
            )
        yield Fleet(services=services, secret=secret)


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with started({"tiers": {"end": {"kind": "DaemonSet"}}}, tmp_path_factory.mktemp("pods"), {}) as fleet:
        async with AsyncClient(url_of(fleet.services["scheduler-0"]), token=fleet.secret["admin.token"]) as client:
            await wait_for(lambda: joined(client, 3), what="the nodes of the chart")
        yield fleet


def url_of(service: ServiceProcess) -> str:
    return service.url.replace("0.0.0.0", "127.0.0.1")


async def joined(client: AsyncClient, nodes: int) -> bool:
    """Whether the scheduler that leads reaches that many nodes."""
    devices = await client.devices()
    return len(devices) == nodes and all(device.reached for device in devices)


async def test_the_services_run_as_rendered_and_know_each_other(fleet: Fleet) -> None:
    url = url_of(fleet.services["scheduler-0"])
    async with AsyncClient(url, token=fleet.secret["admin.token"]) as client:
        devices = {str(device.tier): device for device in await client.devices()}
        assert devices["end"].node_id == f"{NAME}-end-machine-1"
        assert devices["edge"].node_id == f"{NAME}-edge-abc"
        job = await client.wait(await client.submit(read_sample().images[:20], scheme="end-edge"), budget_s=60)
        assert (job.answered_coarse, job.answered_fine) == (20, 20)


async def test_prometheus_reads_each_pod_with_its_token_and_nobody_else_does(fleet: Fleet) -> None:
    for service in fleet.services.values():
        for token, status in (("metrics.token", 200), ("end.token", 401)):
            if service is fleet.services["scheduler-0"] and token == "end.token":
                continue  # a node may read the metrics of the scheduler
            async with fleet.http(token) as http:
                assert (await http.get(f"{url_of(service)}/metrics")).status_code == status
        async with httpx.AsyncClient(trust_env=False) as http:
            for path in ("/livez", "/readyz"):
                assert (await http.get(f"{url_of(service)}{path}")).status_code == 200


async def test_pods_end_when_they_are_told_to(fleet: Fleet) -> None:
    for service in reversed(fleet.services.values()):
        service.terminate()
    assert await asyncio.gather(*(service.exit_code() for service in fleet.services.values())) == [0, 0, 0, 0]


async def test_nodes_of_a_site_join_it_and_share_the_cloud(tmp_path: Path) -> None:
    values = {
        "tiers": {"end": {"enabled": False}, "edge": {"enabled": False}},
        "sites": [{"name": "shop-1", "end": {}, "edge": {}}],
    }
    async with started(values, tmp_path, {}) as fleet:
        url, token = url_of(fleet.services["scheduler-0"]), fleet.secret["admin.token"]
        async with AsyncClient(url, token=token) as client:
            await wait_for(lambda: joined(client, 3), what="the nodes of the chart")
            assert {device.tier: device.site for device in await client.devices()} == {
                "end": "shop-1",
                "edge": "shop-1",
                "cloud": None,
            }
            images = read_sample().images[:20]
            job = await client.wait(await client.submit(images, scheme="end-edge", site="shop-1"), budget_s=60)
        assert (job.answered_coarse, job.answered_fine, job.site) == (20, 20, "shop-1")


async def test_of_two_schedulers_one_leads_and_nodes_and_users_go_over_to_the_other(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    values = {
        "scheduler": {"replicas": 2, "database": {"existingSecret": "postgres"}},
        "tiers": {"cloud": {"enabled": False}},
    }
    readiness = pods(rendered(values))["scheduler"]["containers"][0]["readinessProbe"]["httpGet"]["path"]
    async with started(values, tmp_path, {"url": postgres.database()}) as fleet, httpx.AsyncClient() as http:
        schedulers = [fleet.services["scheduler-0"], fleet.services["scheduler-1"]]
        assert [(await http.get(f"{url_of(each)}{readiness}")).status_code for each in schedulers] == [200, 200]
        said = {(await http.get(f"{url_of(each)}/readyz")).json()["status"]: each for each in schedulers}
        assert said.keys() == {"ready", "standby"}
        urls = ",".join(map(url_of, schedulers))
        async with AsyncClient(urls, token=fleet.secret["admin.token"]) as client:
            await wait_for(lambda: joined(client, 2), what="the nodes of the chart")
            said["ready"].terminate()  # as an update does
            assert await said["ready"].exit_code() == 0
            await wait_for(lambda: joined(client, 2), what="the nodes at the other scheduler")
            job = await client.wait(await client.submit(read_sample().images[:20], scheme="end-edge"), budget_s=60)
        assert (job.answered_coarse, job.answered_fine) == (20, 20)


@pytest.mark.train
@pytest.mark.timeout(180)
async def test_a_run_is_trained_as_rendered(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the extra 'train' (torch)")
    values = {
        "tiers": {tier: {"enabled": False} for tier in ("end", "edge", "cloud")},
        "training": {
            "enabled": True,
            "data": {"existingClaim": "pictures"},
            "host": {"settings": {"epochs": 1}},
            "worker": {"replicas": 2},
        },
    }
    manifests = rendered(values)
    found = jobs(manifests) | {"scheduler": pods(manifests)["scheduler"]}
    (secret,) = (each["stringData"] for each in of_kind(manifests, "Secret"))
    ports = {name: free_port() for name in ("scheduler", "host")}
    hosts = {
        f"http://{NAME}-scheduler:8070": f"http://127.0.0.1:{ports['scheduler']}",
        f"http://{NAME}-training:8074": f"http://127.0.0.1:{ports['host']}",
    }

    def command(name: str, place: str) -> tuple[list[str], dict[str, str]]:
        known = {"folder": tmp_path, "secret": secret, "hosts": hosts, "port": ports.get(name, 0)}
        return started_by_kubelet(found[name], place, **known)

    (scheduler, of_scheduler), (host, of_host) = command("scheduler", "scheduler"), command("host", "host")
    write_digits(tmp_path / "host" / "data", 10_000)
    async with (
        service_process(scheduler, ready_file=tmp_path / "scheduler.ready", environment=of_scheduler) as service,
        service_process(host, ready_file=tmp_path / "host.ready", environment=of_host),
    ):
        workers = []
        for number in range(2):
            args, variables = command("worker", f"worker-{number}")
            environment = {**os.environ, **variables}
            workers.append(await asyncio.create_subprocess_exec(sys.executable, "-P", *args, env=environment))
        assert [await worker.wait() for worker in workers] == [0, 0]
        async with AsyncClient(url_of(service), token=secret["admin.token"]) as client:

            async def ended() -> bool:
                (run,) = (await client.runs()).runs
                return run.state == RunState.FINISHED

            await wait_for(ended, timeout_s=30, what="the end of the run")
    (folder,) = (tmp_path / "host" / "run").iterdir()
    assert json.loads((folder / "result.json").read_text())["accuracy"] > 0.5
