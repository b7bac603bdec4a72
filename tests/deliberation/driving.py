"""A council's flow driven by hand: what each role says is a function of its turn."""

import json
from dataclasses import dataclass, field

from localrag.deliberation import Ask, Council, Judge, Member, Reply, RoleTurn, Search, Tell, Use, Used, Verdict, deliberate
from localrag.types import Chunk, Hit, SamplingParams

TASK = "Which plastic lasts outdoors?"
VERDICT = {"citations": ["KB#1"], "text": "ASA lasts [KB#1].", "decision": "Take ASA.", "confidence": "high", "dissent": []}
CONCLUDE = '{"name":"conclude","arguments":{}}'


def hit(number, *, scope="", score=1.0, text="ASA lasts in the sun."):
    chunk = Chunk(id=number, document_id=number, ordinal=0, text=text, start=0, end=len(text), source="guide.md", scope=scope)
    return Hit(chunk, score)


HITS = tuple(hit(number, score=1 / number) for number in range(1, 6))


def council(num_members=3, *, judge=None, **options):
    members = tuple(Member(name=f"m{number}", persona=f"You know {number}.") for number in range(num_members))
    return Council(name="test", members=members, judge=judge or Judge(), **options)


def with_tools(*, rounds=3, max_tokens=512):
    return Judge(tools=("kb_search", "calculate"), rounds=rounds, sampling=SamplingParams(max_tokens=max_tokens))


def search_for(query):
    return json.dumps({"name": "kb_search", "arguments": {"query": query}})


def plain(turn: RoleTurn) -> str:
    """What a well-behaved role says."""
    match turn.kind:
        case "plan":
            return json.dumps({"strategy": "Compare them.", "searches": ["asa uv", "petg uv"]})
        case "proposal":
            return f"{turn.role} says ASA [KB#1]. So take ASA."
        case "review":
            return json.dumps({"ranking": [proposal.label[-1] for proposal in turn.proposals]})
        case "call":
            return CONCLUDE
    return json.dumps(VERDICT)


@dataclass
class Run:
    verdict: Verdict | None = None
    turns: list[RoleTurn] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)
    searches: list[tuple[str, ...]] = field(default_factory=list)
    used: list[Use] = field(default_factory=list)
    told: dict[str, list] = field(default_factory=dict)

    def of(self, kind):
        return [turn for turn in self.turns if turn.kind == kind]


def sit(who: Council, say=plain, *, hits=HITS, use=lambda _: Used(text="found"), task=TASK, on_turn=lambda _: None) -> Run:
    """All of it. `say` gives a text, or a Reply; each role finds `hits` and sees all that its turn has."""
    run, flow, answer = Run(), deliberate(who, task), None
    while True:
        try:
            step = flow.send(answer)
        except StopIteration as end:
            run.verdict = end.value
            return run
        answer = None
        match step:
            case Ask(turns):
                run.asks.append(step)
                run.turns += turns
                for turn in turns:
                    on_turn(turn)
                answer = tuple(_reply(turn, say(turn)) for turn in turns)
            case Search(queries):
                run.searches.append(queries)
                answer = {member.name: hits for member in who.members} | {"judge": hits}
            case Use():
                run.used.append(step)
                answer = use(step)
            case Tell(event, data):
                json.dumps(data)
                run.told.setdefault(event, []).append(data)


def _reply(turn, said):
    return said if isinstance(said, Reply) else Reply(text=said, finish_reason="stop", hits=turn.hits)


def cut(text):
    return Reply(text=text, finish_reason="length", hits=HITS)
