"""From what is typed to the processes of each rank: its doctor's and its script's."""
