"""The ServerApp: it asks clients to train, aggregates what can be used of their answers, and keeps a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from ... import records, store
from ...engine.server import sample_clients
from ...engine.visit import Progress
from ...errors import Failed, InputError
from ...methods.predictor import Predictor
from ...tree import Tree
from . import messages, rounds
from .rounds import Reply
from .status import RoundStatus, Status
from .terms import Terms, Value, make_terms

ATTEMPTS = 3  # at a round in which too few clients answer
LOOK = 1.0  # seconds between looks for nodes
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    terms, options = make_terms(context.run_config), read_options(context.run_config)
    print(f"federation {terms.id}: {terms.name}, {terms.clients} clients, {terms.settings.rounds} rounds", flush=True)
    Coordinator(grid, terms, options).run()


@dataclass(frozen=True)
class Options:
    """How the server goes about it; nothing that moves numbers."""

    folder: Path  # of checkpoints and status
    timeout: float  # seconds that a phase may take
    wait: float  # seconds to wait for clients that are not there
    fewest: int  # clients of which a round is made
    evaluate_every: int  # rounds between evaluations; 0: only after the last one
    most_rows: int  # that a client is believed to have


def read_options(given: Mapping[str, Value]) -> Options:
    def read(key: str, least: float) -> float:
        value = given[key]
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value < float("inf"):
            raise InputError(f"{key} must be a number from {least:g} on, not {value}.")
        return value

    return Options(
        Path(str(given["folder"])).absolute(),
        float(read("timeout", 1)),
        float(read("wait", 0)),
        int(read("fewest", 1)),
        int(read("evaluate-every", 0)),
        int(read("most-rows", 1)),
    )


@dataclass
class Coordinator:
    grid: Grid
    terms: Terms
    options: Options
    nodes: dict[int, int] = field(default_factory=dict)  # by client: the node that speaks for it
    refused: set[int] = field(default_factory=set)  # nodes

    def run(self) -> None:
        terms, options = self.terms, self.options
        store.make_folder(options.folder)
        with store.hold(options.folder / f"{terms.id}.lock", wait=False) as ours:
            if not ours:
                raise InputError(f"another server works in {options.folder}; end it, or name another folder.")
            self.status = Status(terms.id, terms.name, terms.clients, terms.settings.rounds)
            progress = records.load_progress(self._checkpoint) or rounds.start(terms)
            self.status.round = progress.round
            if progress.round:
                print(f"going on after round {progress.round}", flush=True)
            while progress.round < terms.settings.rounds:
                progress = self._do_round(progress)
                last = progress.round == terms.settings.rounds
                if options.evaluate_every and progress.round % options.evaluate_every == 0 and not last:
                    self._evaluate(progress, {}, export=False)
            self._evaluate(progress, self._conclude(progress), export=True)
            self._say("done")

    @property
    def _checkpoint(self) -> Path:
        return self.options.folder / f"{self.terms.id}.safetensors"

    def _say(self, doing: str) -> None:
        self.status.doing = doing
        self.status.write(self.options.folder)

    # ---- nodes

    def _find_nodes(self, wanted: list[int]) -> dict[int, int]:
        """The nodes of these clients that are there, by client; it waits a while for those that are not."""
        end = time.monotonic() + self.options.wait
        while True:
            there = set(self.grid.get_node_ids())
            self.nodes = {client: node for client, node in self.nodes.items() if node in there}
            if strangers := there - set(self.nodes.values()) - self.refused:
                self._greet(sorted(strangers))
            found = {client: self.nodes[client] for client in wanted if client in self.nodes}
            if len(found) == len(wanted) or time.monotonic() >= end:
                return found
            time.sleep(LOOK)

    def _greet(self, nodes: list[int]) -> None:
        """Ask nodes which client they speak for."""
        asked = messages.address(nodes, messages.HELLO, 0, RecordDict(), self.options.timeout)
        for reply in messages.exchange(self.grid, asked, self.options.timeout):
            node, fault = reply.metadata.src_node_id, messages.read_fault(reply)
            client = messages.read_number(reply, "client") if fault is None else -1
            if fault is None and client not in range(self.terms.clients):
                fault = f"it says that it is client {client:g}"
            if fault is None and messages.read_number(reply, "terms") != int(self.terms.id[:12], 16):
                fault = (
                    "its settings or its data are not those of the server; both need the same version of the package"
                )
            if fault is not None:
                self.refused.add(node)
                print(f"node {node} is refused: {fault}", flush=True)
                continue
            self.nodes[int(client)] = node  # a node that came back has a new id, and the old one stays for a while
            self.status.of(int(client)).node = str(node)
        self._say(self.status.doing)

    # ---- phases

    def _do_round(self, progress: Progress) -> Progress:
        number, terms = progress.round, self.terms
        wanted = sample_clients(terms.clients, terms.settings.participation, terms.seed, number)
        fewest = min(self.options.fewest, len(wanted))
        sent = rounds.name_leaves(progress.server.shared, progress.averages)
        for attempt in range(ATTEMPTS):
            began = time.perf_counter()
            self._say(f"round {number + 1}")
            nodes = self._find_nodes(wanted)
            found = time.perf_counter()
            replies, work = self._train(nodes, messages.pack(sent), number)
            replies += [Reply(k, {}, 0, 0, "its node is not there") for k in wanted if k not in nodes]
            judged = rounds.judge(progress, replies, self.options.most_rows)
            trained = time.perf_counter()
            for client, fault in judged.faults.items():
                self.status.of(client).fault = f"round {number + 1}: {fault}"
                print(f"round {number + 1}: client {client} is left out: {fault}", flush=True)
            if len(judged.good) >= fewest:
                break
            print(f"round {number + 1}: {len(judged.good)} of {fewest} clients, attempt {attempt + 1}", flush=True)
        else:
            self._say("stopped")
            raise Failed(f"only {len(judged.good)} clients can be used in round {number + 1}, and {fewest} are needed")
        progress = rounds.finish_round(terms, progress, judged)
        merged = time.perf_counter()
        records.save_progress(self._checkpoint, progress)
        seconds = {
            "nodes": found - began,
            "train": trained - found,
            "slowest": max(work, default=0.0),
            "merge": merged - trained,
            "save": time.perf_counter() - merged,
        }
        size = messages.count_bytes(sent)
        good = {reply.client: reply for reply in judged.good}
        for client, reply in good.items():
            seen = self.status.of(client)
            seen.round, seen.rows = number + 1, int(reply.rows)
        self.status.round = progress.round
        faults = {str(client): fault for client, fault in judged.faults.items()}
        loss = progress.server.losses[-1]
        self.status.history.append(
            RoundStatus(number + 1, loss, list(good), faults, seconds, {"down": size, "up": size})
        )
        self._say(f"round {number + 1} is done")
        print(f"round {number + 1}: loss {loss:.4f}, {len(good)} of {len(wanted)} clients", flush=True)
        return progress

    def _train(self, nodes: Mapping[int, int], arrays: ArrayRecord, number: int) -> tuple[list[Reply], list[float]]:
        """What clients sent, and how many seconds each worked."""
        content = RecordDict({messages.ARRAYS: arrays, messages.CONFIG: ConfigRecord({"round": number})})
        replies, work = [], []
        for client, answer in self._ask(nodes, messages.TRAIN, number + 1, content).items():
            if answer is None:
                replies.append(Reply(client, {}, 0, 0, f"no answer within {self.options.timeout:g} seconds"))
                continue
            fault, leaves = messages.read_fault(answer), {}
            try:
                leaves = {} if fault else messages.take_arrays(answer.content)
            except InputError as error:
                fault = str(error)
            if fault:
                replies.append(Reply(client, {}, 0, 0, fault))
                continue
            rows, loss = (messages.read_number(answer, name) for name in ("rows", "loss"))
            replies.append(Reply(client, leaves, rows, loss))
            work.append(messages.read_number(answer, "seconds"))
        return replies, work

    def _ask(self, nodes: Mapping[int, int], kind: str, round: int, content: RecordDict) -> dict[int, Message | None]:
        """The answers of clients; None of those who gave none."""
        asked = messages.address(nodes.values(), kind, round, content, self.options.timeout)
        replies = {
            each.metadata.src_node_id: each for each in messages.exchange(self.grid, asked, self.options.timeout)
        }
        return {client: replies.get(node) for client, node in nodes.items()}

    def _evaluate(self, progress: Progress, beside: Tree, export: bool) -> None:
        """Every client that is there rates its own model; after the last round, it writes its bundle, too."""
        self._say("evaluating")
        sent = rounds.name_leaves(progress.server.shared, progress.averages)
        content = RecordDict(
            {
                messages.ARRAYS: messages.pack(sent),
                messages.BESIDE: messages.pack(rounds.name_leaves(beside, {})),
                messages.CONFIG: ConfigRecord({"round": progress.round, "export": export}),
            }
        )
        nodes = self._find_nodes(list(range(self.terms.clients)))
        for client, answer in self._ask(nodes, messages.EVALUATE, progress.round, content).items():
            fault = "no answer" if answer is None else messages.read_fault(answer)
            seen = self.status.of(client)
            if answer is None or fault is not None:
                seen.fault = f"evaluation: {fault}"
                print(f"client {client} is not evaluated: {fault}", flush=True)
            elif messages.read_number(answer, "samples") > 0:
                seen.accuracy = messages.read_number(answer, "accuracy")
        if (accuracy := self.status.accuracy) is not None:
            print(f"round {progress.round}: accuracy {accuracy:.2f} on the clients' own test splits", flush=True)
        self._say("evaluated")

    def _conclude(self, progress: Progress) -> Tree:
        """What clients deploy beside their own; most methods need no message for it."""
        if type(self.terms.method.predictor).summarize is Predictor.summarize:
            return {}
        sent = rounds.name_leaves(progress.server.shared, progress.averages)
        content = RecordDict(
            {messages.ARRAYS: messages.pack(sent), messages.CONFIG: ConfigRecord({"round": progress.round})}
        )
        nodes, told = self._find_nodes(list(range(self.terms.clients))), []
        for client, answer in self._ask(nodes, messages.SUMMARIZE, progress.round, content).items():
            fault = "no answer" if answer is None else messages.read_fault(answer)
            if answer is None or fault is not None:
                print(f"client {client} sends no summary: {fault}", flush=True)
                continue
            summary = rounds.take_leaves(messages.take_arrays(answer.content), progress.round).shared
            told.append((summary, int(messages.read_number(answer, "rows"))))
        return rounds.finish(self.terms, told)
