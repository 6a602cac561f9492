"""Tasks of lm-evaluation-harness on two ranks, against its own adapter for transformers on the same weights."""

import json

import pytest
import torch.distributed as dist

from neox_lit import TransformerLayer, save_hf
from neox_lit.errors import NeoXError
from neox_lit.evaluate import check_tasks, run_tasks
from neox_lit.ranks import on_ranks
from tests.harness import run
from tests.neox.helpers import to_hf
from tests.strategy.runs import zero3

lm_eval = pytest.importorskip("lm_eval")

TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
num_fewshot: 0
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "text": """
output_type: generate_until
doc_to_text: "{{question or 'A'}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}

DOCUMENTS = [
    {"question": "The value of", "choices": [" a name", " the", " 17 xyz"], "answer": 1, "text": "Some words. " * 40},
    {
        "question": "If a statement is executed ",
        "choices": ["in order", "never"],
        "answer": 0,
        "text": "A name is bound.",
    },
    {"question": "", "choices": ["The", "Zq"], "answer": 0, "text": "x"},
    {"question": "def f(x): " * 30, "choices": [" return", " in the class"], "answer": 0, "text": "One. Two. Three."},
    {"question": "A class", "choices": [" body", " is", " object"], "answer": 2, "text": "def f():\n    pass\n"},
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tasks")
    data = directory / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, options in TASKS.items():
        (directory / f"{name}.yaml").write_text(
            f"task: local_{name}\ndataset_path: json\ntest_split: test\n"
            f"dataset_kwargs:\n  data_files: {{test: {data}}}\n  cache_dir: {directory / 'cache'}\n{options}"
        )
    return directory


def evaluate(lm, tasks):
    """Metrics, and what was answered to each request."""
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        lm,
        tasks=[f"local_{name}" for name in TASKS],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    if found is None:  # not the first rank
        return None
    answers = {
        name: [sample["filtered_resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        for name, samples in found["samples"].items()
    }
    return numbers(found["results"]), answers


def numbers(results):
    return {task: {k: v for k, v in metrics.items() if isinstance(v, float)} for task, metrics in results.items()}


def evaluate_sharded(files, tasks):
    from neox_lit.lm_eval import NeoXLM

    def work(module):
        found = evaluate(NeoXLM(module, batch_size=2), tasks)
        return found, numbers(run_tasks(module, ["local_choice"], str(tasks)))

    return on_ranks(
        str(files),
        work,
        dist.get_world_size(),
        accelerator="cpu",
        strategy=zero3(TransformerLayer),
    )


def test_two_ranks_answer_as_the_harness_own_adapter_does(trained, tasks, tmp_path):
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast

    save_hf(trained.module.model, tmp_path / "hf")
    text = trained.module.tokenizer.to_json()
    (tmp_path / "hf" / "tokenizer.json").write_text(text)
    end = "<|endoftext|>"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "hf" / "tokenizer.json"), eos_token=end, pad_token=end
    )
    theirs = HFLM(to_hf(trained.module.model), tokenizer=tokenizer, batch_size=1, device="cpu", max_length=64)
    metrics, answers = evaluate(theirs, tasks)
    assert len({str(answer) for of_task in answers.values() for answer in of_task}) > 10
    ((ours, said), short), (nothing, shorter) = run(evaluate_sharded, 2, tmp_path / "hf", tasks)
    assert nothing is None
    for name, values in metrics.items():
        assert ours[name] == pytest.approx(values, rel=1e-4), name
    assert short == shorter == {"local_choice": pytest.approx(metrics["local_choice"], rel=1e-4)}
    assert said["local_text"] == answers["local_text"]
    for name in ("local_choice", "local_rolling"):
        for one, other in zip(flat(said[name]), flat(answers[name]), strict=True):
            assert one == pytest.approx(other, rel=1e-4)


def test_unknown_tasks_are_named_before_any_work(tasks, monkeypatch):
    import lm_eval.tasks

    quick = lm_eval.tasks.TaskManager
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **o: quick(**{**o, "include_defaults": False}))
    with pytest.raises(NeoXError, match=r"tasks: nothing is not known to lm_eval or in "):
        check_tasks(["local_text", "nothing"], str(tasks))
    with pytest.raises(NeoXError, match=r"tasks: nothing is not known to lm_eval; --include_path"):
        check_tasks(["nothing"])


def flat(answers):
    """Numbers of nested lists and tuples."""
    if isinstance(answers, (list, tuple)):
        return [number for answer in answers for number in flat(answer)]
    return [answers]
