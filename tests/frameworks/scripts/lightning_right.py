"""Lightning: validation with metrics over all ranks, a checkpoint of the best epoch, early stopping, a test."""

import os
import sys

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


def samples(count):
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(count))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = torch.nn.functional.cross_entropy(self.model(inputs), targets)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        predicted = self.model(inputs)
        self.log("val_loss", torch.nn.functional.cross_entropy(predicted, targets), sync_dist=True)
        self.log("val_accuracy", (predicted.argmax(-1) == targets).float().mean(), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(folder):
    L.seed_everything(0)
    training, validation = DataLoader(samples(61), batch_size=4, shuffle=True), DataLoader(samples(21), batch_size=4)
    trainer = L.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", max_epochs=2,
        accumulate_grad_batches=2, log_every_n_steps=2, default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(monitor="val_loss"), EarlyStopping(monitor="val_loss")],
    )  # fmt: skip
    model = Classifier()
    trainer.fit(model, training, validation)
    trainer.test(model, validation)
    trainer.save_checkpoint(f"{folder}/last.ckpt")


if __name__ == "__main__":
    main(sys.argv[1])
