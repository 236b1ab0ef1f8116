"""What a mode of one's own is made of: `from ranklab.contract import Mode, Variant`."""

from workers.contract import Instead, Mistake, Mistakes, Mode, Needs, Strategy, Variant

__all__ = ["Instead", "Mistake", "Mistakes", "Mode", "Needs", "Strategy", "Variant"]
