"""Test-time adaptation as the papers write it down: one batch after another, plain lists, autograd and torch.optim.

`logits(params, x)` is the model; params and `tuned`, the names of what may change, are by dotted name.
"""

from __future__ import annotations

import math

import torch


def entropy(p):
    return -sum(float(q) * math.log(float(q)) for q in p if q > 0)


def mean_entropies(logits):
    p = logits.softmax(1)
    return -(p * p.log()).sum(1)


def free(params):
    """A copy of the params that asks for gradients, of all of them: without that of its input, torch's group norm may
    end the process."""
    return {name: leaf.detach().clone().requires_grad_() for name, leaf in params.items()}


def lame_batch(h, p, k, steps):
    """h [n, d] features, p [n, classes] predictions; lists of lists of probabilities."""
    n, classes = p.shape
    unit = [[float(v) / math.sqrt(sum(float(w) ** 2 for w in row)) for v in row] for row in h]
    near = []
    for i in range(n):
        others = sorted((math.dist(unit[i], unit[j]), j) for j in range(n) if j != i)
        near.append([j for _, j in others[:k]])
    answers = [[float(v) for v in row] for row in p]
    for _ in range(steps):
        pulled = []
        for i in range(n):
            raw = [float(p[i, c]) * math.exp(sum(answers[j][c] for j in near[i])) for c in range(classes)]
            pulled.append([value / sum(raw) for value in raw])
        answers = pulled
    return torch.tensor(answers, dtype=p.dtype)


def tent_stream(logits, params, tuned, x, batch, lr):
    model = free(params)
    adam = torch.optim.Adam([model[name] for name in tuned], lr=lr)
    answers = []
    for some in x.split(batch):
        found = logits(model, some)
        answers.append(found.detach())
        adam.zero_grad()
        mean_entropies(found).mean().backward()
        adam.step()
    return torch.cat(answers), model


def sar_stream(logits, params, tuned, x, batch, lr, momentum, margin, rho, reset):
    """Algorithm 1. Also returns the number of resets."""

    def begin():
        model = free(params)
        return model, torch.optim.SGD([model[name] for name in tuned], lr=lr, momentum=momentum)

    model, sgd = begin()
    average, resets, answers = None, 0, []
    for some in x.split(batch):
        found = logits(model, some)
        answers.append(found.detach())
        most = margin * math.log(found.shape[1])
        kept = [i for i, value in enumerate(mean_entropies(found)) if value < most]
        if not kept:  # nothing to learn from: the momentum goes on
            for name in tuned:
                model[name].grad = torch.zeros_like(model[name])
            sgd.step()
        else:
            sgd.zero_grad()
            mean_entropies(found)[kept].mean().backward()
            length = math.sqrt(sum(float((model[name].grad ** 2).sum()) for name in tuned))
            shifts = {name: rho * model[name].grad / (length + 1e-12) for name in tuned}
            away = {name: leaf + shifts.get(name, 0) for name, leaf in model.items()}
            values = mean_entropies(logits(away, some))[kept]
            again = values[values < most]
            for name in tuned:
                model[name].grad = torch.zeros_like(model[name])
            if len(again):
                again.mean().backward()
            sgd.step()
            value = float(values.detach().mean())
            average = value if average is None else 0.9 * average + 0.1 * value
        if average is not None and average < reset:
            (model, sgd), resets = begin(), resets + 1
    return torch.cat(answers), model, average, resets


class ClassMemory:
    """RoTTA's memory: a list of (sample, view, uncertainty, age) for every class."""

    def __init__(self, size, classes, timeliness=1.0, uncertainty=1.0):
        self.size, self.classes, self.weights = size, classes, (timeliness, uncertainty)
        self.held = [[] for _ in range(classes)]

    def score(self, doubt, age):
        timeliness, uncertainty = self.weights
        return timeliness / (1 + math.exp(-age / self.size)) + uncertainty * doubt / math.log(self.classes)

    def add(self, x, view, label, doubt):
        if self.make_room(label, self.score(doubt, 0)):
            self.held[label].append([x, view, doubt, 0])
        for items in self.held:
            for item in items:
                item[3] += 1

    def make_room(self, label, score):
        if len(self.held[label]) >= self.size / self.classes:
            return self.drop_worst([label], score)
        if sum(map(len, self.held)) < self.size:
            return True
        most = max(map(len, self.held))
        return self.drop_worst([c for c in range(self.classes) if len(self.held[c]) == most], score)

    def drop_worst(self, classes, score):
        scored = [(self.score(item[2], item[3]), c, i) for c in classes for i, item in enumerate(self.held[c])]
        worst, c, i = max(scored)
        if worst <= score:
            return False
        del self.held[c][i]
        return True


def rotta_stream(logits, params, tuned, x, views, batch, lr, nu, memory):
    student, teacher = free(params), {name: leaf.clone() for name, leaf in params.items()}
    adam = torch.optim.Adam([student[name] for name in tuned], lr=lr)
    answers = []
    for some, seen in zip(x.split(batch), views.split(batch), strict=True):
        found = logits(teacher, some)
        answers.append(found)
        for one, view, p in zip(some, seen, found.softmax(1), strict=True):
            memory.add(one, view, int(p.argmax()), entropy(p))
        items = [item for of_class in memory.held for item in of_class]
        total = 0.0
        for one, view, _, age in items:
            wanted = logits(teacher, one[None]).softmax(1)
            weight = math.exp(-age / memory.size) / (1 + math.exp(-age / memory.size))
            total = total - weight * (wanted * logits(student, view[None]).log_softmax(1)).sum() / len(items)
        adam.zero_grad()
        total.backward()
        adam.step()
        for name in tuned:
            teacher[name] = (1 - nu) * teacher[name] + nu * student[name].detach()
    return torch.cat(answers), student, teacher


def entropy_gradients(logits, params, x):
    model = free(params)
    gradients = torch.autograd.grad(mean_entropies(logits(model, x)).mean(), list(model.values()))
    return dict(zip(model, gradients, strict=True))


def atp_rates(logits, params, rates, batches, lr):
    """The rates after a step on every batch (x, y); by dotted name."""
    rates = dict(rates)
    for x, y in batches:
        unsupervised = entropy_gradients(logits, params, x)
        moved = {name: params[name] - rates[name] * unsupervised[name] for name in params}
        model = free(moved)
        losses = -logits(model, x).log_softmax(1)[torch.arange(len(y)), y]
        supervised = torch.autograd.grad(losses.mean(), list(model.values()))
        for name, gradient in zip(model, supervised, strict=True):
            agreement = float((gradient * unsupervised[name]).sum())
            rates[name] += lr * agreement / math.sqrt(gradient.numel())
    return rates


def atp_stream(logits, params, rates, x, batch):
    answers, seen = [], []
    for some in x.split(batch):
        seen.append(entropy_gradients(logits, params, some))
        mean = {name: sum(each[name] for each in seen) / len(seen) for name in params}
        answers.append(logits({name: params[name] - rates[name] * mean[name] for name in params}, some))
    return torch.cat(answers)
