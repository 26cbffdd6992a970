"""benchmarks.integrations: what it takes, and what it makes of runs."""

import json

import pytest

from benchmarks import integrations


def test_rows_count_what_was_generated():
    run = {"outputs": [[1, 2, 3], [4, 5]], "seconds": 2.0, "rates": [3.0, 2.0]}
    row = integrations.make_row(run, {"outputs": [[1, 2, 3], [4, 6]], "rates": [1.0, 2.0]}, {"drafted": 4, "accepted": 1})
    assert (row["tok_s"], row["identical"], row["tokens_per_step"], row["drafted"], row["accepted"]) == (2.5, 1, 1.25, 4, 1)
    assert row["speedup"] == 2.0, "the median of the turns' ratios"
    assert integrations.make_row(run, run, {"drafted": None, "accepted": None})["tokens_per_step"] is None


class Host:
    def __init__(self):
        self.asked = []

    def ask(self, **request):
        self.asked.append(request)
        return {"outputs": [prompt[:1] for prompt in request["prompts"]], "seconds": 1.0}


@pytest.mark.parametrize(("concurrency", "turns"), [(1, [1] * 12), (2, [6, 6]), (4, [12]), (8, [12])])
def test_every_host_gets_all_prompts_in_turns(concurrency, turns):
    hosts = {"none": Host(), "ngramspec": Host()}
    prompts = [integrations.Prompt(str(i), [i, 50]) for i in range(12)]
    runs = integrations.run_turns(hosts, prompts, concurrency)
    for name, host in hosts.items():
        assert runs[name]["outputs"] == [[i] for i in range(12)]
        assert runs[name]["seconds"] == len(turns)
        assert host.asked[0]["warm_up"]
        assert host.asked[0]["prompts"] == [[50, 11]], "of what is measured nothing is known before"
        assert [len(request["prompts"]) for request in host.asked[1:]] == turns


@pytest.mark.parametrize(
    "options",
    [
        ["--modes", "ngramspec"],
        ["--modes", "none,suffix"],
        ["--concurrency", "2"],
        ["--limit", "1,2"],
        ["--host", "vllm", "--concurrency", "8,4"],
        ["--host", "vllm", "--concurrency", "8,1,1", "--limit", "4,2,2"],
        ["--host", "vllm", "--concurrency", "8,1"],
    ],
)
def test_what_does_not_fit_a_host_is_refused(tmp_path, options):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a"}))
    with pytest.raises(SystemExit):
        integrations.parse_args(["--host", "transformers", "--prompts", str(tmp_path / "p.jsonl"), *options])


@pytest.mark.parametrize(("options", "limits"), [(["--limit", "5"], [5, 5]), (["--limit", "5,2"], [5, 2])])
def test_one_limit_is_for_all_or_one_for_each(tmp_path, options, limits):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a"}))
    args = integrations.parse_args(["--host", "vllm", "--prompts", str(tmp_path / "p.jsonl"), "--concurrency", "8,1", *options])
    assert (args.concurrency, args.limit) == ([8, 1], limits)


def test_no_prompt_is_asked_twice(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": [i]}) + "\n" for i in range(5)))
    asked = ["--host", "vllm", "--prompts", str(path), "--concurrency", "8,1", "--limit"]
    sets = integrations.read_sets(integrations.parse_args([*asked, "3,2"]), None)
    assert [(c, [prompt.ids for prompt in prompts]) for c, _, prompts in sets] == [(8, [[0], [1], [2]]), (1, [[3], [4]])]
    with pytest.raises(SystemExit, match="no more than 5"):
        integrations.read_sets(integrations.parse_args([*asked, "5,2"]), None)
