"""Every option of a job: its type, its default, its check, and the Flink keys that set it.

Everything may import it. It imports nothing but `errors`.
"""

from strandline.config.config import Config, reference_markdown

__all__ = ["Config", "reference_markdown"]
