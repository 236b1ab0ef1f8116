"""accelerate: accumulation of gradients, evaluation by gather_for_metrics, a checkpoint by the main process."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def samples(count):
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(count))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def evaluate(accelerator, model, loader):
    model.eval()
    right = []
    for inputs, targets in loader:
        with torch.no_grad():
            predicted = model(inputs).argmax(-1)
        predicted, targets = accelerator.gather_for_metrics((predicted, targets))
        right.append((predicted == targets).float())
    model.train()
    return torch.cat(right).mean().item()


def main(folder):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    training = DataLoader(samples(61), batch_size=4, shuffle=True)
    validation = DataLoader(samples(21), batch_size=4)
    model, optimizer, training, validation, scheduler = accelerator.prepare(
        model, optimizer, training, validation, scheduler
    )
    for epoch in range(2):
        for inputs, targets in training:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        mean_loss = accelerator.reduce(loss.detach(), reduction="mean").item()
        accuracy = evaluate(accelerator, model, validation)
        accelerator.print(f"epoch {epoch} loss {mean_loss:.3f} accuracy {accuracy:.2f}")
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), f"{folder}/model.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
