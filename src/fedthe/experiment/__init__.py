"""Experiments: `run.run` trains, deploys and tests methods; `results` holds what came of it."""
