"""Names of our settings in other libraries: PEFT, transformers and TRL, torchtune, Unsloth, Axolotl.

These names serve hints only. They are not aliases, because the settings differ in more than the name.
"""

from __future__ import annotations

_SYNONYMS = {
    "model": "model_name model_name_or_path pretrained_model_name_or_path base_model checkpoint_dir",
    "tokenizer": "tokenizer_name tokenizer_name_or_path",
    "data": "dataset dataset_name dataset_path train_file train_data",
    "full": "full_finetuning finetuning_type",
    "num_steps": "steps max_steps max_steps_per_epoch total_steps iterations num_iterations iters",
    "num_epochs": "epochs num_train_epochs epoch",
    "rank": "r lora_r lora_rank lora_dim",
    "alpha": "lora_alpha lora_scale",
    "lora_dropout": "dropout lora_drop adapter_dropout",
    "loraplus_ratio": "loraplus_lr_ratio loraplus lora_plus",
    "lora_init": "init_lora_weights",
    "modules_to_save": "additional_target lora_modules_to_save",
    "bias": "lora_bias train_bias",
    "targets": "target_modules lora_target_modules lora_attn_modules lora_target target_parameters",
    "batch_size": "per_device_train_batch_size train_batch_size micro_batch_size per_device_batch_size",
    "seq_len": "max_seq_length max_seq_len max_length model_max_length sequence_len sequence_length cutoff_len "
    "block_size context_length",
    "learning_rate": "lr max_lr peak_lr",
    "schedule": "lr_scheduler lr_scheduler_type lr_schedule scheduler",
    "final_rate_fraction": "min_lr min_lr_rate min_lr_ratio min_learning_rate lr_scheduler_kwargs cosine_min_lr_ratio",
    "decay_fraction": "num_decay_steps decay_steps lr_decay_steps decay_ratio",
    "schedule_steps": "lr_decay_iters num_training_steps",
    "warmup_steps": "num_warmup_steps warmup warmup_iters lr_warmup_steps",
    "warmup_ratio": "warmup_fraction",
    "max_grad_norm": "clip_grad_norm gradient_clipping grad_clip gradient_clip_val max_norm clip",
    "adam_beta1": "betas adam_betas beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "eps epsilon adam_eps",
    "weight_decay": "wd",
    "param_dtype": "torch_dtype dtype model_dtype",
    "state_dtype": "optim_bits optimizer_state_dtype adamw_8bit use_8bit_optimizer",
    "compute_dtype": "bf16 fp16 mixed_precision",
    "remat": "gradient_checkpointing activation_checkpointing enable_activation_checkpointing "
    "use_gradient_checkpointing",
    "layers_per_remat": "recompute_num_layers checkpoint_num_layers",
    "attention": "attn_implementation attn_impl flash_attention use_flash_attention",
    "tile_tokens": "tiled_mlp tiled_mlp_num_shards",
    "offload": "enable_activation_offloading optimizer_in_bwd cpu_offload offload_optimizer",
    "eval_every": "eval_steps eval_interval run_val_every_n_steps evaluation_strategy eval_strategy val_check_interval",
    "held_out_fraction": "val_set_size test_size validation_split val_fraction",
    "checkpoint_every": "save_steps save_interval save_every_n_steps save_strategy save_every",
    "max_to_keep": "save_total_limit keep_last_n_checkpoints num_checkpoints",
    "load_best_at_end": "load_best_model_at_end",
    "early_stopping_patience": "early_stopping patience",
    "seed": "random_state data_seed random_seed",
    "track": "report_to metric_logger logging_backend log_with tracker use_wandb",
    "project": "wandb_project project_name trackio_project",
    "run_name": "wandb_name wandb_run_name experiment_name",
}
_SETTING_OF_SYNONYM = {name: setting for setting, names in _SYNONYMS.items() for name in names.split()}
_REMARKS = {
    "load_in_4bit": "--quantize nf4",
    "load_in_8bit": "--quantize int8",
    "use_qlora": "--quantize nf4",
    "gradient_accumulation_steps": "num_microbatches, the parts of a batch; batch_size counts all parts together",
    "gradient_accumulation": "num_microbatches, the parts of a batch; batch_size counts all parts together",
    "grad_accum_steps": "num_microbatches, the parts of a batch; batch_size counts all parts together",
    "accumulate_grad_batches": "num_microbatches, the parts of a batch; batch_size counts all parts together",
    "output_dir": "--out, the folder of the run",
    "out_dir": "--out, the folder of the run",
    "resume_from_checkpoint": "--resume, with the --out of the run",
}


def setting_of(name: str) -> str | None:
    """Return our name for a well-known setting of another library.

    Args:
        name: a key or a flag, with or without its dashes.

    Returns:
        Our name, with a remark where the meaning differs; None for an unknown name.
    """
    key = name.lstrip("-").partition("=")[0].replace("-", "_").lower()
    return _REMARKS.get(key) or _SETTING_OF_SYNONYM.get(key)
