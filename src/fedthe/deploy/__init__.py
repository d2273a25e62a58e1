"""A trained client leaves the laboratory: bundles, an online predictor, a monitor, ONNX."""
