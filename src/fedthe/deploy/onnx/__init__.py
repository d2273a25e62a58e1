"""One deployed client as one ONNX file, which `fedthe.runtime` runs without torch."""

from .export import export_onnx as export_onnx
from .quantize import quantize_onnx as quantize_onnx
