"""transformers' Trainer, started again from its last checkpoint where there is one."""

import sys
from pathlib import Path

from trainer_right import Sentences
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


def main(folder):
    set_seed(0)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    )
    arguments = TrainingArguments(
        output_dir=folder, num_train_epochs=2, per_device_train_batch_size=4, save_strategy="steps", save_steps=3,
        logging_steps=2, report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Sentences(64))
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if Path(folder).is_dir() else None)


if __name__ == "__main__":
    main(sys.argv[1])
