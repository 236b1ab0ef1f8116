"""The whole path of a rank, top to bottom: settings, join, experiment, report, exit code.

    environment -> Config -> rendezvous -> Lab -> experiments.<mode>.run(lab) -> runs/<run_id>/ -> report -> exit code

`python -m workers` with RANK in the environment is that rank; with neither RANK nor MASTER_ADDR it starts all ranks as
local processes. Exit codes: 0 every check held; 1 a check failed, an error was raised or the disk filled; 2 the
settings were refused; 3 the cluster broke; 143 stopped by SIGTERM, 130 by Ctrl-C.
"""

import os
import sys
import time

from workers.config import Config, ConfigError


def main() -> int:
    """Start the ranks, or be one; returns the exit code."""
    started_at = time.time()
    try:
        config = Config.read()
        if config.rank is None:
            from workers.cluster.launch import launch

            return launch(config)
        # torch.set_num_threads would bind this thread alone, and gloo's, in which PyTorch's hooks compute, would take all cores:
        # a QR of 32 columns has other bits there, so replicas differed with the thread that each rank's hook ran in.
        os.environ["OMP_NUM_THREADS"] = str(config.threads)
        from workers.rank.start import be_rank  # torch comes in here: faults above are said without waiting for it

        return be_rank(config, started_at)
    except ConfigError as error:
        for fault in error.faults:
            print(f"refused    {fault}", flush=True)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
