"""The manifests are valid by Kubernetes' newest schema, with the right numbers and variables."""

import re
import socket
from typing import Any

import kubernetes_validate
import pytest
import yaml

from distlab.cli.engine import ENGINES, kinds, main, manifest
from distlab.lab.config import Config, launchers

KINDS = ("indexed-job", "jobset", "trainjob")


def made(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["kubernetes", *words]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def rank_of(kind: str, document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the Job of a manifest as Kubernetes sees it, and the container of a rank."""
    spec = document["spec"]
    if kind == "trainjob":
        (replicated,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        job = replicated["template"]["spec"]
        patched = job["template"]["spec"]
        patched["restartPolicy"] = "Never"  # the runtime's own, which the patch leaves alone
        patched["containers"][0] |= {key: spec["trainer"][key] for key in ("image", "command", "env")}
    else:
        job = spec if kind == "indexed-job" else spec["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "distlab"}, "spec": job}
    return whole, container


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_a_manifest_is_valid(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    documents = made(capsys, "--as", kind, "--ranks", "16", "fsdp")
    job, _ = rank_of(kind, documents[-1])
    own = [document for document in documents if "." not in document["apiVersion"].partition("/")[0]]
    assert [each["kind"] for each in own] == (["Service", "PersistentVolumeClaim", "Job"] if kind == KINDS[0] else [])
    for document in [*own, job]:
        kubernetes_validate.validate(document, "1.37", strict=True)


def test_a_misspelt_field_is_seen() -> None:
    text = (ENGINES / "kubernetes" / "indexed-job.yaml").read_text().replace("completionMode", "completionsMode")
    job = list(yaml.safe_load_all(text))[-1]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.37", strict=True)


def test_values_that_no_schema_checks_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    """Fields with a few valid values, for which the schemas accept any text."""
    service, claim, job = made(capsys)
    assert (service["apiVersion"], service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == (
        "v1", "None", True,
    )  # fmt: skip
    pod = job["spec"]["template"]["spec"]
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert pod["subdomain"] == service["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert (job["spec"]["completionMode"], pod["restartPolicy"]) == ("Indexed", "OnFailure")
    (jobset,) = made(capsys, "--as", "jobset")
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    inner = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (inner["completionMode"], inner["template"]["spec"]["restartPolicy"]) == ("Indexed", "Never")
    (trainjob,) = made(capsys, "--as", "trainjob")
    assert (trainjob["apiVersion"], trainjob["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert set(trainjob["spec"]) == {"runtimeRef", "trainer", "runtimePatches"}
    assert set(trainjob["spec"]["trainer"]) == {"image", "command", "numNodes", "numProcPerNode", "env"}


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_image_and_settings_are_inserted(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    words = ["--as", kind, "--ranks", "700", "--image", "here:5000/distlab:7", "tp", "LAB_CLIP=0.5", "LAB_RUN_ID=mine"]
    document = made(capsys, *words)[-1]
    job, container = rank_of(kind, document)
    environ = {entry["name"]: entry["value"] for entry in container["env"]}
    assert len(environ) == len(container["env"]), "no variable twice"
    wanted = {"RUN_MODE": "tp", "LAB_CLIP": "0.5", "LAB_RUN_ID": "mine", "LAB_RESUME": "auto"}
    assert wanted.items() <= environ.items()
    assert container["image"] == "here:5000/distlab:7"
    if kind == "trainjob":
        assert (document["spec"]["trainer"]["numNodes"], document["spec"]["trainer"]["numProcPerNode"]) == (700, 1)
    else:
        assert (job["spec"]["completions"], job["spec"]["parallelism"], environ["WORLD_SIZE"]) == (700, 700, "700")
    if kind == "indexed-job":
        assert job["spec"]["backoffLimit"] == 2100


def test_a_pod_of_the_indexed_job_is_a_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, container = rank_of("indexed-job", made(capsys, "--ranks", "12", "dp")[-1])
    environ = {entry["name"]: entry["value"] for entry in container["env"]} | {"JOB_COMPLETION_INDEX": "11"}
    monkeypatch.setattr(socket, "getfqdn", lambda: "distlab-11.distlab.default.svc.cluster.local")
    taken = launchers.read_launcher(environ)
    config = Config.read(environ | taken.variables, taken.faults)
    assert (config.rank, config.world_size) == (11, 12)
    assert config.master_addr == "distlab-0.distlab.default.svc.cluster.local"


@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_is_complete_for_four_ranks(kind: str) -> None:
    text = (ENGINES / "kubernetes" / f"{kind}.yaml").read_text()
    unset = re.sub(r"^ *# settings\n", "", text, flags=re.MULTILINE)
    assert manifest(text, 4, "distlab:latest", {}) == unset
    assert text.count("# settings") == text.count("# image") == 1


def test_all_faults_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kubernetes", "--ranks", "1025", "WORLD_SIZE=4", "LAB_STEP=3"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "refused    WORLD_SIZE=4 is set by the manifest: --ranks gives the number of ranks, a volume has their runs",
        "refused    --ranks 1025 is out of range: expected 1 to 1024",
        "refused    LAB_STEP is not a variable of the lab (did you mean 'LAB_STEPS'?)",
    ]
    assert main(["kubernetes", "dp", "--as", "trainjbo"]) == 2
    assert "--as 'trainjbo' is none of indexed-job, jobset, trainjob" in capsys.readouterr().err


def test_the_plain_manifest_is_the_first() -> None:
    assert tuple(kinds("kubernetes")) == KINDS
