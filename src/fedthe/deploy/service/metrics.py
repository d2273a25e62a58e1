"""What Prometheus reads."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class Metrics:
    """Of one application: a registry of its own, so that two can live in a process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.answers = Counter(
            "fedthe_answers", "Samples answered, by bundle and status.", ["bundle", "status"], registry=self.registry
        )
        self.refused = Counter(
            "fedthe_refused", "Requests that were refused, by HTTP status.", ["code"], registry=self.registry
        )
        self.seconds = Histogram(
            "fedthe_answer_seconds",
            "From the sample to its answer.",
            ["bundle"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.batch = Gauge("fedthe_batch_size", "Samples answered together, on average.", registry=self.registry)
        self.weight = Histogram(
            "fedthe_global_weight",
            "The weight of the global head.",
            ["bundle"],
            buckets=[i / 10 for i in range(1, 11)],
            registry=self.registry,
        )

    def write(self, sizes: list[int]) -> bytes:
        self.batch.set(sum(sizes) / len(sizes) if sizes else 0)
        return generate_latest(self.registry)
