"""What always holds of an answer object (docs/reference/output.md), checked on one."""


def check(answer: dict, retrieved: list[str]) -> None:
    """Every identity, on the object that `--json` prints; `retrieved` are the labels of all hits that were offered."""
    slot, usage, ledger = answer["slot"], answer["usage"], answer["ledger"]
    entries = {entry["name"]: entry for entry in ledger["entries"]}
    written = [entries[name] for name in ("thinking", "answer") if name in entries]
    assert sum(entry["used"] for entry in entries.values() if entry not in written) == usage["prompt_tokens"]
    assert usage["prompt_tokens"] + sum(entry["allotted"] for entry in written) <= slot["n_ctx"] <= slot["n_ctx_train"]
    assert ledger["window"] == slot["n_ctx"]
    assert sum(entry["allotted"] for entry in entries.values()) + ledger["spare"] == ledger["window"]
    assert all(0 <= entry["used"] <= entry["allotted"] for entry in entries.values())
    assert sum(entry["used"] for entry in written) == usage["completion_tokens"]
    assert sum(entry["used"] for entry in written[:-1]) == usage.get("reasoning_tokens", 0)
    assert entries["answer"].get("copied", 0) == usage.get("copied_tokens", 0)
    assert bool(answer.get("reasoning", "")) <= bool(usage.get("reasoning_tokens", 0))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    kept = [each["id"] for each in answer["evidence"]]
    omitted = entries.get("evidence", {"omitted": []})["omitted"]
    assert sorted(kept + omitted) == sorted(retrieved)
    assert len(set(kept + omitted)) == len(kept + omitted)
    supplied = {each["id"]: each["supplied"] for each in answer["citations"]}
    assert all(is_supplied == (label in kept) for label, is_supplied in supplied.items())
    spans = [span for each in answer["citations"] for span in each["spans"]]
    assert all(each["spans"] for each in answer["citations"])
    assert all(0 <= start < end <= len(answer["answer"]) for start, end in spans)
    assert answer["unsupported_citations"] == [label for label, is_supplied in supplied.items() if not is_supplied]
    _check_support(answer, kept)
    assert answer["coverage"]["chunks_read"] == len(kept)


def _check_support(answer: dict, kept: list[str]) -> None:
    text, sources = answer["answer"], {each["id"]: each for each in answer["evidence"]}
    assert bool(answer["support"]) == (bool(kept) and any(map(str.isalnum, text)))
    for each in answer["support"]:
        assert 0 <= each["start"] < each["end"] <= len(text)
        assert (each["score"] is None) == (each["citations"] == [])
        if span := each["span"]:
            source = sources[span["id"]]
            assert span["id"] in each["citations"]
            assert source["start"] <= span["start"] < span["end"] <= source["end"]
            assert span["source"] == source["source"]
    for claim in answer["unsupported_claims"]:
        assert text[claim["start"] : claim["end"]] == claim["text"]
