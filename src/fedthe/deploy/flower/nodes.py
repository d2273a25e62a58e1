"""Which node speaks for which client: nodes are greeted, and their answers judged."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from ...text import count
from . import messages, rounds
from .options import Options
from .status import Status
from .terms import Terms

LOOK = 1.0  # seconds between looks for nodes
GREETING = 600.0  # seconds, or as long as `wait`: a node that has not answered a greeting by then is greeted again


@dataclass
class Nodes:
    grid: Grid
    mail: messages.Mail
    terms: Terms
    options: Options
    status: Status
    by_client: dict[int, int] = field(default_factory=dict)  # the node that speaks for each
    rows: dict[int, int] = field(default_factory=dict)  # by client, as it says
    refused: set[int] = field(default_factory=set)  # nodes
    reasons: dict[int, str] = field(default_factory=dict)  # by client: why its node was refused
    greeted: dict[str, Message] = field(default_factory=dict)  # by id: what nodes have not answered yet
    met: dict[int, float] = field(default_factory=dict)  # by node: when it was first greeted
    replaced: dict[int, int] = field(default_factory=dict)  # by node: the one that speaks for its client now

    def find(self, wanted: list[int]) -> dict[int, int]:
        """The nodes of these clients that are there, by client; it waits a while for those that are not.

        It waits longer for nodes that are new and silent: they finish what an earlier run asked of them first.
        """
        end, patient = time.monotonic() + self.options.wait, False
        while True:
            there = set(self.grid.get_node_ids())
            self.by_client = {client: node for client, node in self.by_client.items() if node in there}
            self.refused &= there
            self.replaced = {old: new for old, new in self.replaced.items() if old in there and new in there}
            self._greet(there - set(self.by_client.values()) - self._silent - self.refused - self.replaced.keys())
            self._hear()
            found = {client: self.by_client[client] for client in wanted if client in self.by_client}
            now = time.monotonic()
            busy = {node for node in self._silent & there if now < self.met[node] + self._greeting}
            if len(found) == len(wanted) or (now >= end and not busy):
                return found
            if now >= end and not patient:
                patient = True
                print(f"waiting for {count(len(busy), 'node')} that may be busy with an earlier run", flush=True)
            time.sleep(LOOK)

    @property
    def _silent(self) -> set[int]:
        """Nodes that have not answered their greeting."""
        return {each.metadata.dst_node_id for each in self.greeted.values()}

    @property
    def _greeting(self) -> float:
        """Seconds that a node has to answer one."""
        return min(self.options.timeout, max(GREETING, self.options.wait))

    def _greet(self, nodes: set[int]) -> None:
        """Ask nodes which client they speak for. Nobody waits for an answer: a node may be gone unnoticed."""
        hello = {node: RecordDict() for node in sorted(nodes)}
        self.met = dict.fromkeys(nodes, time.monotonic()) | self.met
        self.greeted |= self.mail.post(messages.address(hello, messages.HELLO, 0, self._greeting))

    def _hear(self) -> None:
        """Take the answers of nodes that were greeted."""
        replies = self.mail.pull(self.greeted)
        for id, reply in replies.items():
            node = self.greeted.pop(id).metadata.dst_node_id
            if messages.is_lost(reply):  # with a key, the same node may come back
                continue
            client, rows = (messages.read_number(reply, name) for name in ("client", "rows"))
            if (fault := self._judge(reply, client, rows)) is not None:
                self.refused.add(node)
                if client in range(self.terms.clients) and client not in self.by_client:
                    self.reasons[int(client)] = f"its node is refused: {fault}"
                print(f"node {node} is refused: {fault}", flush=True)
                continue
            self.reasons.pop(int(client), None)
            before = self.by_client.get(int(client))
            if before is not None:  # a node that came back has a new id, and the old one stays for a while
                self.replaced[before] = node
                print(
                    f"node {node} takes the place of node {before} as client {int(client)}: "
                    "it was restarted, or two nodes have the same partition-id",
                    flush=True,
                )
            self.rows[int(client)] = int(rows)
            self.by_client[int(client)] = node
            self.status.of(int(client)).node = str(node)
        if replies:
            self.status.write(self.options.folder)

    def _judge(self, reply: Message, client: float, rows: float) -> str | None:
        """Why a node cannot take part."""
        if (fault := messages.read_fault(reply)) is not None:
            return fault
        if client not in range(self.terms.clients):
            return f"it says that it is client {client:g}"
        if messages.read_number(reply, "terms") != int(self.terms.id[:12], 16):
            return "its settings or data differ from the server's; check that both run the same version of fedthe"
        if not 1 <= rows <= self.options.most_rows:
            return rounds.say_rows(rows, self.options.most_rows)
        return None

    def begin_round(self) -> None:
        """What a node was refused for may be mended."""
        self.refused.clear()
        self.reasons.clear()

    def drop(self, client: int) -> None:
        self.by_client.pop(client, None)

    def explain_absence(self, client: int) -> str:
        silent = ", or does not answer" if self._silent else ""
        return self.reasons.get(client, f"its node is not there{silent}")
