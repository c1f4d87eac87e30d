"""Exporting the metrics of this machine's GPUs and runs, for Prometheus and OTLP."""

from __future__ import annotations

from gpuprobe.exporter.export import ExportSettings, export, export_once

__all__ = ["ExportSettings", "export", "export_once"]
