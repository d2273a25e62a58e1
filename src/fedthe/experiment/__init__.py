"""Experiments: `run.run_prepared` trains, deploys and tests methods; `results` holds what came of it."""
