"""What drafting brings, and which drafts: `python -m benchmarks.report` measures, and writes REPORT.md with pictures."""
