"""Why a job hung, judged from what it left behind: `distlab check --dump DIR`."""
