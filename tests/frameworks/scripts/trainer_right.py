"""transformers' Trainer: evaluation, metrics, logging and checkpoints while it trains; the best model is saved."""

import sys

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Sentences(torch.utils.data.Dataset):
    def __init__(self, count):
        self.tokens = torch.randint(5, 50, (count, 8), generator=torch.Generator().manual_seed(count))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": int(self.tokens[index].sum() > 220)}


def accuracy(predicted):
    return {"accuracy": float((np.argmax(predicted.predictions, -1) == predicted.label_ids).mean())}


def main(folder):
    model = BertForSequenceClassification(
        BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    )
    arguments = TrainingArguments(
        output_dir=folder, num_train_epochs=2, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        eval_strategy="steps", eval_steps=4, save_strategy="steps", save_steps=4, logging_steps=2,
        load_best_model_at_end=True, metric_for_best_model="accuracy", report_to=[], disable_tqdm=True,
        average_tokens_across_devices=False,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Sentences(61), eval_dataset=Sentences(21),
        compute_metrics=accuracy,
    )  # fmt: skip
    trainer.train()
    print(trainer.evaluate()["eval_accuracy"])
    trainer.save_model(f"{folder}/best")


if __name__ == "__main__":
    main(sys.argv[1])
