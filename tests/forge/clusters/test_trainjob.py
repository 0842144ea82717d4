"""TrainJobs and runtimes: what Kubeflow's own classes read of them is all that is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import forge
from forge._errors import SettingsError
from forge.cli._app import main
from forge.clusters import ForgeConfig, LoraConfig, runtimes, train_job
from forge.clusters._trainjob import as_yaml

from ...whole.fake_clusters import expanded

ROOT = Path(__file__).parents[3]
GIVEN = {"model_path": "org/model", "data_path": "train.jsonl", "ckpt_output_dir": "first", "learning_rate": 0.001}
BOTH = {"model_uri": "hf://org/model", "dataset_uri": "hf://org/rows"}


def documents() -> list[dict[str, Any]]:
    """The runtimes that are shipped."""
    return list(yaml.safe_load_all((ROOT / "deploy" / "kubeflow" / "runtimes.yaml").read_text()))


def job(settings: dict[str, object] | None = None, **options: Any) -> dict[str, Any]:
    """The TrainJob of a recipe, as its YAML says it."""
    config = ForgeConfig(settings=GIVEN if settings is None else settings)
    return yaml.safe_load(as_yaml(train_job(config, **{"dataset_uri": "hf://org/rows", **options})))


def read_as(kind: str, document: dict[str, Any]) -> dict[str, Any]:
    """What Kubeflow's class of this name reads of a document: fields that it does not know are not in it."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    return getattr(models, f"TrainerV1alpha1{kind}").from_dict(document).to_dict()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_runtimes_have_only_fields_that_kubeflow_knows(number: int) -> None:
    """Read by the class of the API and written again, each of the three is the same."""
    document = documents()[number]
    assert read_as("ClusterTrainingRuntime", document) == document


@pytest.mark.parametrize(
    ("nodes", "gpus", "runtime"), [(1, 0, "cpu"), (1, 1, "gpu"), (1, 8, "multi-node"), (4, 8, "multi-node")]
)
def test_a_trainjob_has_only_fields_that_kubeflow_knows(nodes: int, gpus: int, runtime: str) -> None:
    """So does a TrainJob of each size, whose runtime is one of those that are shipped."""
    document = job(nodes=nodes, gpus=gpus)
    assert read_as("TrainJob", document) == document
    assert document["spec"]["runtimeRef"]["name"] == f"forge-{runtime}"
    assert document["spec"]["runtimeRef"]["name"] in [each["metadata"]["name"] for each in documents()]
    assert document["spec"]["trainer"]["numNodes"] == nodes
    assert document["spec"]["trainer"]["numProcPerNode"] == max(1, gpus)


def test_the_check_of_fields_finds_what_is_planted() -> None:
    """A misspelled field is not in what the class reads."""
    document = job()
    document["spec"]["trainer"]["numNode"] = 2
    assert read_as("TrainJob", document) != document


def test_the_shipped_runtimes_are_what_the_command_writes(capsys: pytest.CaptureFixture[str]) -> None:
    """deploy/kubeflow/runtimes.yaml is `forge kubeflow runtimes`; an image of one's own stands in all containers of forge."""
    assert (ROOT / "deploy" / "kubeflow" / "runtimes.yaml").read_text() == runtimes() + "\n"
    assert main(["kubeflow", "runtimes", "mine:1"]) == 0
    out = capsys.readouterr().out
    assert out.count("image: mine:1") == 6
    assert "example" not in out
    with pytest.raises(SettingsError, match="image must be"):
        runtimes("a b")


def test_what_the_parts_promise_each_other() -> None:
    """Names that the controller looks for; PET_* for preflight too; a shared volume; statuses of forge in the rules."""
    for document in documents():
        spec = document["spec"]
        (target,) = spec["mlPolicy"]["torch"]["envInjection"]["targets"]
        jobs = {each["name"]: each["template"] for each in spec["template"]["spec"]["replicatedJobs"]}
        assert list(jobs) == ["dataset-initializer", "model-initializer", "node"]
        node = jobs["node"]["spec"]
        pod = node["template"]["spec"]
        assert target == {"jobName": "node", "containerNames": [pod["initContainers"][0]["name"]]}
        for name, template in jobs.items():
            step = template["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"]
            assert step == ("trainer" if name == "node" else name)
            (container,) = template["spec"]["template"]["spec"]["containers"]
            assert container["name"] == name
            assert {"name": "initializer", "mountPath": "/workspace"} in container["volumeMounts"]
        codes = {
            (rule["action"], value)
            for rule in node["podFailurePolicy"]["rules"]
            for value in rule.get("onExitCodes", {}).get("values", [])
        }
        assert codes == {("FailJob", forge.SettingsError.exit_status), ("Ignore", forge.PreemptedError.exit_status)}
        assert pod["restartPolicy"] == "Never"
        assert pod["terminationGracePeriodSeconds"] >= 60
    access = [
        each["spec"]["template"]["spec"]["volumeClaimPolicies"][0]["templates"][0]["spec"]["accessModes"]
        for each in documents()
    ]
    assert access == [["ReadWriteOnce"], ["ReadWriteOnce"], ["ReadWriteMany"]]


def test_a_recipe_stands_where_the_pod_finds_it() -> None:
    """Model and rows where the initializers put them, the run on the volume, all in flags and in preflight's recipe."""
    data = {"a.jsonl": 0.5, "/workspace/dataset/b.jsonl": 0.5}
    spec = job(
        {**GIVEN, "data_path": data, "eval_data_path": ["c.jsonl", "https://x/d.jsonl"], "nproc_per_node": 2}, nodes=2, gpus=4
    )["spec"]
    assert spec["initializer"] == {"dataset": {"storageUri": "hf://org/rows"}, "model": {"storageUri": "hf://org/model"}}
    assert spec["trainer"]["numProcPerNode"] == 2
    assert spec["trainer"]["command"] == ["forge", "sft"]
    assert spec["trainer"]["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "4"}}
    assert spec["trainer"]["args"] == [
        "--model-path=/workspace/model",
        *("--data-path", "/workspace/dataset/a.jsonl=0.5", "/workspace/dataset/b.jsonl=0.5"),
        "--ckpt-output-dir=/workspace/output/first",
        "--learning-rate=0.001",
        *("--eval-data-path", "/workspace/dataset/c.jsonl", "https://x/d.jsonl"),
    ]
    ((each,),) = [patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"] for patch in spec["runtimePatches"]]
    (container,) = each["template"]["spec"]["template"]["spec"]["initContainers"]
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    assert (container["name"], env["FORGE_VERB"]) == ("preflight", "sft")
    recipe = yaml.safe_load(env["FORGE_RECIPE"])
    assert recipe["data_path"] == {"/workspace/dataset/a.jsonl": 0.5, "/workspace/dataset/b.jsonl": 0.5}
    assert recipe["ckpt_output_dir"] == "/workspace/output/first"
    assert "FORGE_MACHINE" not in env
    patch = str(job(nodes=2, gpus=8, machine="16xH100-80GB")["spec"]["runtimePatches"])
    assert "'name': 'FORGE_MACHINE', 'value': '16xH100-80GB'" in patch


def test_kubernetes_expands_nothing() -> None:
    """`$(HOME)` and `$$` of a setting are escaped where Kubernetes would read them."""
    spec = job({**GIVEN, "eval_prompts": ["$(HOME) costs $$5"], "validation_split": 0.5})["spec"]
    assert "$$(HOME) costs $$$$5" in spec["trainer"]["args"]
    assert "$$(HOME) costs $$$$5" in str(spec["runtimePatches"])


def test_a_runtime_of_ones_own_is_taken_as_it_is() -> None:
    """No initializer and no patch that it may not have; paths are those in its volume."""
    settings = {**GIVEN, "model_path": "/models/m", "data_path": "/rows/train.jsonl", "ckpt_output_dir": "/runs/first"}
    spec = job(settings, runtime="mine", dataset_uri=None, image="mine:1", name="run-7")["spec"]
    assert set(spec) == {"runtimeRef", "trainer"}
    assert spec["runtimeRef"]["name"] == "mine"
    assert spec["trainer"]["image"] == "mine:1"
    assert "--ckpt-output-dir=/runs/first" in spec["trainer"]["args"]


def test_other_accelerators_are_asked_for_by_name() -> None:
    """The resource is the cluster's, and the processes are said, which the controller would count only for some names."""
    trainer = job(gpus=8, gpu_resource="habana.ai/gaudi")["spec"]["trainer"]
    assert trainer["resourcesPerNode"] == {"limits": {"habana.ai/gaudi": "8"}}
    assert trainer["numProcPerNode"] == 8


@pytest.mark.parametrize(
    ("settings", "options", "named"),
    [
        (GIVEN, {"dataset_uri": None}, "give dataset_uri"),
        ({**GIVEN, "model_path": "/models/m"}, {}, "give model_uri"),
        ({"data_path": "a.jsonl"}, {}, "model_path is required"),
        ({**GIVEN, "data_path": "/data/a.jsonl"}, {}, "data_path='/data/a.jsonl' is outside of /workspace"),
        ({**GIVEN, "eval_data_path": "../../a.jsonl"}, {}, "eval_data_path='../../a.jsonl' is outside of /workspace"),
        ({**GIVEN, "data_path": "~/a.jsonl"}, {"runtime": "mine"}, "is outside of /workspace"),
        ({**GIVEN, "ckpt_output_dir": "~/run"}, {"runtime": "mine"}, "ckpt_output_dir=~/run is lost"),
        ({**GIVEN, "rename_columns": {"question": "a=b"}}, {}, "rename_columns=.* a command line would read"),
        (GIVEN, {"dataset_uri": "/rows"}, "dataset_uri must be"),
        (GIVEN, {"model_uri": "hf://"}, "model_uri must be"),
        ({**GIVEN, "ckpt_output_dir": "/tmp/run"}, {}, "ckpt_output_dir=/tmp/run is lost"),
        ({**GIVEN, "ckpt_output_dir": "/workspace/../x"}, {}, "is lost with the pod"),
        (GIVEN, {"name": "Mine"}, "name must be"),
        (GIVEN, {"name": "a" * 64}, "name must be"),
        (GIVEN, {"nodes": 0}, "nodes must be"),
        (GIVEN, {"nodes": True}, "nodes must be"),
        (GIVEN, {"gpus": -1}, "gpus must be"),
        (GIVEN, {"gpus": 2, "nproc_per_node": 4}, "nproc_per_node=4 is more than the 2"),
        (GIVEN, {"gpu_resource": "gpu"}, "gpu_resource must be"),
        (GIVEN, {"machine": "big"}, "machine='big'"),
        (GIVEN, {"machine": "24GB", "runtime": "mine"}, "machine is for the preflight"),
        ({**GIVEN, "nproc_per_node": "cpu"}, {}, "nproc_per_node='cpu' depends on a machine"),
        ({**GIVEN, "nnodes": 2}, {}, "nnodes=2 is what the cluster says"),
        ({**GIVEN, "lr": 1}, {}, "learning_rate"),
    ],
)
def test_what_a_pod_cannot_have_is_refused(settings: dict[str, object], options: dict[str, Any], named: str) -> None:
    """By name, with what to do."""
    with pytest.raises(SettingsError, match=named):
        job(settings, **options)


def test_files_and_functions_of_this_machine_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module beside the recipe, and a file that a setting names: a pod has neither."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.py").write_text("def f(row): return row\n")
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    with pytest.raises(SettingsError, match="preprocess='rows:f' is in rows.py"):
        job({**GIVEN, "preprocess": "rows:f"})
    with pytest.raises(SettingsError, match="chat_template='template.jinja' is a file of this machine"):
        job({**GIVEN, "chat_template": "template.jinja"})
    with pytest.raises(SettingsError, match="is a file of this machine"):
        job({**GIVEN, "chat_template": str(tmp_path / "template.jinja")})
    assert job({**GIVEN, "preprocess": "elsewhere:f", "chat_template": "/workspace/dataset/template.jinja"})


def test_the_command_writes_a_new_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`forge kubeflow render` prints or writes; a file that is there stays, and errors speak of flags."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"verb": "dpo", **GIVEN}))
    words = ["kubeflow", "render", str(recipe), "--nodes", "2", "--gpus", "8", "--dataset-uri", "hf://org/rows"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["spec"]["trainer"]["command"] == ["forge", "dpo"]
    assert main([*words, "--output", str(tmp_path / "job.yaml")]) == 0
    assert (tmp_path / "job.yaml").read_text() == printed
    assert main([*words, "--output", str(tmp_path / "job.yaml")]) == 2
    assert main(words[:3]) == 2
    assert "--dataset-uri" in capsys.readouterr().err


def test_the_adapters_of_the_proposal_reach_the_command() -> None:
    """`peft_config` becomes flags like any other setting."""
    made = train_job(ForgeConfig(settings=GIVEN, peft_config=LoraConfig(lora_rank=8)), dataset_uri="hf://org/rows")
    assert {"--adapter=lora", "--lora-r=8"} < set(made["spec"]["trainer"]["args"])


def test_dollars_are_what_the_recipe_says() -> None:
    """Kubernetes expands `$(NAME)` and `$$` in arguments and variables: what comes out is what was written."""
    odd = "a $$b $(PET_NNODES) $HOME $"
    settings = {**GIVEN, "ckpt_output_dir": f"/workspace/output/{odd}", "wandb_run_name": odd}
    document = job(settings)
    env = {"PET_NNODES": "4"}
    args = [expanded(word, env) for word in document["spec"]["trainer"]["args"]]
    assert f"--ckpt-output-dir=/workspace/output/{odd}" in args
    assert f"--wandb-run-name={odd}" in args
    (patch,) = document["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    (container,) = node["template"]["spec"]["template"]["spec"]["initContainers"]
    recipe = next(each["value"] for each in container["env"] if each["name"] == "FORGE_RECIPE")
    assert yaml.safe_load(expanded(recipe, env))["wandb_run_name"] == odd


@pytest.mark.parametrize(("nodes", "runtime", "most"), [(1, None, 33), (1000, None, 33), (1, "mine", 48), (1000, "mine", 46)])
def test_names_leave_room_for_those_of_pods(nodes: int, runtime: str | None, most: int) -> None:
    """A TrainJob of 63 characters is taken by the cluster, and its pods, whose names are longer, are never made."""
    given = {**GIVEN, "effective_batch_size": 1000}
    assert job(given, name="a" * most, nodes=nodes, runtime=runtime)["metadata"]["name"] == "a" * most
    with pytest.raises(SettingsError, match=f"name must be at most {most} "):
        job(given, name="a" * (most + 1), nodes=nodes, runtime=runtime)


def test_texts_stay_texts_in_every_reader_of_yaml() -> None:
    """What YAML 1.2, or Kubernetes' reader, takes for a switch or a number is quoted."""
    settings = {**GIVEN, "adapter": "lora", "target_modules": ["y", "1e5", "0o17", "q_proj"]}
    text = as_yaml(train_job(ForgeConfig(settings=settings), dataset_uri="hf://org/rows", name="n"))
    for written in ("name: 'n'", "- 'y'", "- '1e5'", "- '0o17'", "- q_proj"):
        assert f"{written}\n" in text


@pytest.mark.parametrize("option", [{"image": ""}, {"image": "a b"}, {"runtime": ""}, {"runtime": "Mine: x"}])
def test_names_of_images_and_runtimes_are_names(option: dict[str, str]) -> None:
    """What no cluster could find is refused before it is asked."""
    with pytest.raises(SettingsError, match=f"{next(iter(option))} must be"):
        job(**option)
