"""Lightning, started again from its last checkpoint, which it writes at the end of each epoch."""

import sys

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_right import Classifier
from torch.utils.data import DataLoader, TensorDataset


def main(folder):
    L.seed_everything(0)
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    training = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=4, shuffle=True)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=4, default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=folder, save_last=True, every_n_epochs=1)],
    )  # fmt: skip
    trainer.fit(Classifier(), training, ckpt_path="last", weights_only=False)


if __name__ == "__main__":
    main(sys.argv[1])
