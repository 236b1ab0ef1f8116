"""From the command line to each rank's processes: its supervisor's and its script's."""
