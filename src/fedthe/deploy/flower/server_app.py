"""The ServerApp: it asks clients to train, aggregates what can be used of their answers, and keeps a checkpoint."""

from __future__ import annotations

import secrets
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from ... import foreign, records, store, tree
from ...engine.server import count_sampled, sample_clients
from ...engine.visit import Progress
from ...errors import Failed, InputError
from ...text import count, flatten
from ...tree import Tree
from . import messages, privacy, processes, rounds, secure
from .nodes import LOOK, Nodes
from .options import Options, read_options
from .rounds import Judged, Reply
from .status import RoundStatus, Status, resume
from .terms import Terms, make_terms

DELTA = 1e-5  # at which epsilon is reported
ATTEMPTS = 3  # per round, while too few clients answer
MOST_WEIGHT = 8  # times the median number of rows
HANDOVER = 30.0  # seconds until the app of a server that was stopped has noticed
LOCK = "server.lock"
MOST_FAULTS = 3  # that a failed round names
app = ServerApp()
processes.shorten_errors()


@app.main()
def main(grid: Grid, context: Context) -> None:
    if "--parent-pid" in sys.argv:
        processes.end_with_parent()
    terms, options = make_terms(context.run_config), read_options(context.run_config)
    sampled = count_sampled(terms.clients, terms.settings.participation)
    if options.fewest > sampled:
        raise InputError(f"fewest={options.fewest}, but a round has {count(sampled, 'client')}; ask for fewer.")
    if options.secure:
        rounds.check_mean(terms, "secure-aggregation")
    if options.noise:
        rounds.check_mean(terms, "noise-multiplier")
    size = f"{count(terms.clients, 'client')}, {count(terms.settings.rounds, 'round')}"
    print(f"federation {terms.id}: {terms.name}, {size}", flush=True)
    print(f"its checkpoint and status are in {options.folder}", flush=True)
    if options.noise:
        epsilon = privacy.bound_epsilon(options.noise, terms.settings.rounds, DELTA)
        print(f"noise: epsilon is at most {epsilon:.3g} at delta {DELTA:g}, if no round is repeated", flush=True)
    coordinator = Coordinator(grid, context, terms, options)
    processes.bound_transfers(coordinator.mail)
    coordinator.run()


class Trained(NamedTuple):
    judged: Judged
    work: list[float]  # seconds of each client
    bytes: dict[str, int]  # down to each client, and up from it


@dataclass
class Coordinator:
    grid: Grid
    context: Context
    terms: Terms
    options: Options
    origin: str = ""
    mail: messages.Mail = field(init=False)
    nodes: Nodes = field(init=False)

    def __post_init__(self) -> None:
        self.mail = messages.Mail(self.grid)

    def run(self) -> None:
        terms, options = self.terms, self.options
        store.make_folder(options.folder)
        with self._hold_folder():
            saved = records.load_progress(self._checkpoint) or records.load_progress(self._checkpoint_before)
            progress, self.origin = saved or rounds.start(terms), self._find_origin(begins=saved is None)
            begun = Status(terms.id, terms.name, terms.clients, terms.settings.rounds)
            self.status, other = resume(options.folder, begun, progress.round)
            if other is not None:
                size = f"{other.round} of {count(other.rounds, 'round')} done"
                print(
                    f"the folder also holds federation {other.id} ({size}), with other settings; it is kept", flush=True
                )
            if progress.round:
                print(f"going on after round {progress.round}", flush=True)
            if progress.round >= terms.settings.rounds:
                print("no round is left; clients rate their models and write their bundles again", flush=True)
            self.nodes = Nodes(self.grid, self.mail, terms, options, self.status)
            try:
                self._run(progress)
            except BaseException as error:
                ended = isinstance(error, SystemExit | KeyboardInterrupt)
                why = "its process was ended" if ended else flatten(error, 300) or type(error).__name__
                self._say(f"stopped: {why}")
                raise

    @contextmanager
    def _hold_folder(self) -> Iterator[None]:
        end = time.monotonic() + HANDOVER
        with ExitStack() as held:
            while not held.enter_context(store.hold(self.options.folder / LOCK, wait=False)):
                if time.monotonic() >= end:
                    raise InputError(f"another server is using {self.options.folder}; stop it, or name another folder.")
                time.sleep(LOOK)
            yield

    def _run(self, progress: Progress) -> None:
        terms, options = self.terms, self.options
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

    @property
    def _checkpoint_before(self) -> Path:
        """That of the round before, for an operator who deletes the last one."""
        return self._checkpoint.with_suffix(".before.safetensors")

    def _find_origin(self, begins: bool) -> str:
        """What distinguishes the states that clients keep for this server from those of others with equal settings."""
        path = self._checkpoint.with_suffix(".origin")
        if begins:
            store.write_bytes(path, secrets.token_hex(8).encode())
        elif not path.exists():
            raise InputError(f"{path}, which belongs to the checkpoint, is missing; put it back.")
        return messages.check_origin(foreign.read_file(path, 100).decode(errors="replace"))

    @property
    def _unmasked(self) -> secure.Unmasked:
        return secure.Unmasked(self._checkpoint.with_suffix(".unmasked"))

    def _say(self, doing: str) -> None:
        self.status.doing = doing
        self.status.write(self.options.folder)

    # ---- phases

    def _do_round(self, progress: Progress) -> Progress:
        number, terms = progress.round, self.terms
        wanted = sample_clients(terms.clients, terms.settings.participation, terms.seed, number)
        fewest = self.options.fewest
        self.nodes.begin_round()
        for attempt in range(ATTEMPTS):
            if self.options.secure and self._unmasked.read() > number:
                raise Failed(
                    f"clients were asked to unmask the sum of round {number + 1} already, and with a second sum the "
                    f"upload of a client may be found; delete {self._unmasked.path} to try the round again all the same"
                )
            began = time.perf_counter()
            self._say(f"in round {number + 1}")
            nodes = self.nodes.find(wanted)
            found = time.perf_counter()
            absent = [Reply(k, {}, 0, 0, self.nodes.explain_absence(k)) for k in wanted if k not in nodes]
            if self.options.secure:
                judged, work, size = self._train_masked(progress, nodes, absent, fewest)
            else:
                judged, work, size = self._train(progress, nodes, absent)
            trained = time.perf_counter()
            for client, fault in judged.faults.items():
                self.status.of(client).fault = f"round {number + 1}: {fault}"
                print(f"round {number + 1}: client {client} is left out: {fault}", flush=True)
            if len(judged.good) >= fewest:
                break
            too_few = f"{count(len(judged.good), 'client')} can be used, but fewest={fewest}"
            print(f"round {number + 1}, attempt {attempt + 1} of {ATTEMPTS}: {too_few}", flush=True)
        else:
            named = [f"client {client}: {fault.rstrip('.')}" for client, fault in judged.faults.items()]
            raise Failed("; ".join([f"round {number + 1} failed: {too_few}", *named[:MOST_FAULTS]]))
        if self.options.noise:
            before = rounds.name_leaves(progress.server.shared, progress.averages)
            noised = privacy.average(before, [reply.leaves for reply in judged.good], self.options.noise)
            judged = judged._replace(mean=noised)
        progress = rounds.finish_round(terms, progress, judged)
        merged = time.perf_counter()
        if self._checkpoint.exists():
            self._checkpoint.replace(self._checkpoint_before)
        records.save_progress(self._checkpoint, progress)
        seconds = {
            "nodes": found - began,
            "train": trained - found,
            "mean": sum(work) / max(1, len(work)),
            "slowest": max(work, default=0.0),
            "merge": merged - trained,
            "save": time.perf_counter() - merged,
        }
        good = {reply.client: reply for reply in judged.good}
        for client, reply in good.items():
            seen = self.status.of(client)
            seen.round, seen.rows = number + 1, int(reply.rows)
        self.status.round = progress.round
        faults = {str(client): fault for client, fault in judged.faults.items()}
        loss = progress.server.losses[-1]
        self.status.history.append(RoundStatus(number + 1, loss, list(good), faults, seconds, size))
        self._say("between rounds")
        print(f"round {number + 1}: loss {loss:.4f}, {len(good)} of {len(wanted)} clients", flush=True)
        return progress

    def _train(self, progress: Progress, nodes: Mapping[int, int], absent: list[Reply]) -> Trained:
        sent = rounds.name_leaves(progress.server.shared, progress.averages)
        replies, work = list(absent), []
        for client, answer in self._ask(nodes, messages.TRAIN, progress, progress.round + 1).items():
            if answer is None or messages.is_lost(answer):
                self.nodes.drop(client)  # until it answers again
            leaves, fault = self._read_leaves(answer)
            if answer is None or fault is not None:
                replies.append(Reply(client, {}, 0, 0, fault))
                continue
            rows, loss = (messages.read_number(answer, name) for name in ("rows", "loss"))
            replies.append(Reply(client, leaves, rows, loss))
            work += messages.keep_finite([messages.read_number(answer, "seconds")])
        judged, size = rounds.judge(progress, replies, self.options.most_rows), tree.count_bytes(sent)
        return Trained(judged, work, {"down": size, "up": size})

    def _train_masked(self, progress: Progress, nodes: Mapping[int, int], absent: list[Reply], fewest: int) -> Trained:
        """The same by secure aggregation. The round covers every client that stays, or fails as a whole."""
        rows = self.nodes.rows
        claims = [rows[client] for client in nodes] or [1]
        # uploads are rounded in steps of the largest weight, so one client must not make it large
        most = int(min(max(claims), MOST_WEIGHT * statistics.median(claims)))
        sent = rounds.name_leaves(progress.server.shared, progress.averages)
        states = {node: rounds.find_state(progress, client) for client, node in nodes.items()}
        asked = secure.Asked(sent, progress.round, self.origin, states, most, fewest, self._unmasked)
        found = secure.collect(self.mail, self.context, asked, self.options.timeout)
        faults = {reply.client: str(reply.fault) for reply in absent}
        for client, node in nodes.items():
            if node in found.gone | found.wrong:
                self.nodes.drop(client)  # until it answers again
            if node in found.wrong:
                self.nodes.refused.add(node)  # in this round
            if node not in found.losses:
                faults[client] = found.faults.get(node, found.why or "no masked upload")
        if found.mean is None:
            return Trained(Judged([], faults), [], {})
        if fault := rounds.find_fault(sent, Reply(-1, found.mean, 1, 0.0), 1):
            raise Failed(
                f"the mean of round {progress.round + 1} cannot be used: {fault}; masks hide whose fault it is"
            )
        # rows and losses are only shown: the weight of an upload is hidden in it
        held = [Reply(k, {}, rows[k], found.losses[node]) for k, node in nodes.items() if node in found.losses]
        return Trained(Judged(held, faults, found.mean), messages.keep_finite(found.seconds), found.bytes)

    def _read_leaves(self, answer: Message | None) -> tuple[dict[str, Tensor], str | None]:
        """What a client sent, or why nothing of it can be used."""
        if answer is None:
            return {}, messages.say_silence(self.options.timeout)
        if (fault := messages.read_fault(answer)) is not None:
            return {}, fault
        try:
            return messages.take_arrays(answer.content), None
        except InputError as error:
            return {}, str(error)

    def _ask(
        self,
        nodes: Mapping[int, int],
        kind: str,
        progress: Progress,
        round: int,
        beside: Mapping[str, ArrayRecord] | None = None,
        **config: bool,
    ) -> dict[int, Message | None]:
        """Send clients the model; their answers, and None of those who gave none."""
        model = messages.pack(rounds.name_leaves(progress.server.shared, progress.averages))

        @cache  # Flower sends equal contents once
        def make_content(state: int) -> RecordDict:
            how = ConfigRecord({"round": progress.round, "state": state, "origin": self.origin, **config})
            return RecordDict({messages.ARRAYS: model, **(beside or {}), messages.CONFIG: how})

        contents = {node: make_content(rounds.find_state(progress, client)) for client, node in nodes.items()}
        asked = messages.address(contents, kind, round, self.options.timeout + messages.LATE)
        replies = self.mail.exchange(asked, self.options.timeout)
        return {client: replies.get(node) for client, node in nodes.items()}

    def _evaluate(self, progress: Progress, beside: Tree, export: bool) -> None:
        """Every client that is there rates its own model; after the last round, it writes its bundle, too."""
        self._say("evaluating")
        for seen in self.status.seen.values():
            seen.accuracy = None
        more = {messages.BESIDE: messages.pack(rounds.name_leaves(beside, {}))}
        nodes = self.nodes.find(list(range(self.terms.clients)))
        answers = self._ask(nodes, messages.EVALUATE, progress, progress.round, more, export=export)
        for client, answer in answers.items():
            fault = "no answer" if answer is None else messages.read_fault(answer)
            seen = self.status.of(client)
            if answer is None or fault is not None:
                seen.fault = f"evaluation: {fault}"
                print(f"client {client} is not evaluated: {fault}", flush=True)
            elif messages.read_number(answer, "samples") > 0:
                claimed = messages.read_number(answer, "accuracy")
                seen.accuracy = claimed if 0 <= claimed <= 100 else None
        self.status.rated = progress.round
        if (accuracy := self.status.accuracy) is not None:
            print(f"round {progress.round}: accuracy {accuracy:.2f} on the clients' own test splits", flush=True)
        self._say("evaluated")

    def _conclude(self, progress: Progress) -> Tree:
        """What clients deploy beside their own; most methods need no message for it."""
        expected = rounds.expect_summary(self.terms)
        if not expected:
            return {}
        nodes, told = self.nodes.find(list(range(self.terms.clients))), []
        for client, answer in self._ask(nodes, messages.SUMMARIZE, progress, progress.round).items():
            leaves, fault = self._read_leaves(answer)
            claimed = 0.0 if answer is None else messages.read_number(answer, "rows")
            reply = Reply(client, leaves, claimed, 0.0, fault)
            fault = fault or rounds.find_summary_fault(self.terms, expected, reply, self.options.most_rows)
            if fault is not None:
                print(f"client {client} sends no summary: {flatten(fault, 300)}", flush=True)
                continue
            told.append((rounds.take_leaves(leaves, progress.round).shared, int(claimed)))
        if not told:
            raise Failed("no client sent a summary that can be used; start the run again when they are there")
        return rounds.finish(self.terms, told)
