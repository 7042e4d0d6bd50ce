"""Every field of TRL 1.16's GRPOConfig and AsyncGRPOConfig and every argument of their trainers, and what becomes of it here.

Invariant: nothing that a TRL script says is dropped in silence. A value is mapped to a setting of ours, honoured by code of its own,
accepted with one logged line that says why it has no effect, or refused with what to do instead. TRL's own default (and None) asks for
nothing and is always accepted. `python -m harness_rl.trl.docs` prints this table as docs/trl.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

How = Literal["mapped", "honoured", "accepted", "refused"]
Where = Literal["both", "grpo", "async", "trainer"]


@dataclass(frozen=True)
class Field:
    name: str
    how: How
    text: str
    """mapped: `section.key` of RunConfig; honoured: what is done; accepted: why it has no effect; refused: what to do instead."""
    default: Any = None
    """TRL's. A field that is left out means this, where it changes what is learned."""

    def asks(self, value: Any) -> bool:
        """Whether a value says more than leaving the field out."""
        return value is not None and value != self.default and not (self.default is None and value in (False, "", [], {}))


def _mapped(**targets: tuple[str, Any]) -> Iterable[Field]:
    return [Field(name, "mapped", target, default) for name, (target, default) in targets.items()]


def _honoured(text: str, **defaults: Any) -> Iterable[Field]:
    return [Field(name, "honoured", text, default) for name, default in defaults.items()]


def _accepted(text: str, **defaults: Any) -> Iterable[Field]:
    return [Field(name, "accepted", text, default) for name, default in defaults.items()]


def _refused(text: str, **defaults: Any) -> Iterable[Field]:
    return [Field(name, "refused", text, default) for name, default in defaults.items()]


def _table(*parts: Iterable[Field]) -> dict[str, Field]:
    return {field.name: field for part in parts for field in part}


COMMON = _table(
    # -- the run ------------------------------------------------------------------------------------------------------------------------
    _honoured("the run folder: checkpoints, metrics, every rollout", output_dir=None),
    _honoured("optimizer steps, rounded up to whole batches: run.steps; -1: from num_train_epochs and the data set", max_steps=-1),
    _honoured("passes over the data set where max_steps is not set", num_train_epochs=3.0),
    _mapped(seed=("run.seed", 42)),
    _honoured(
        "their product is a step's completions: rollout.groups_per_step = product / num_generations",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
    ),
    _honoured("as train(resume_from_checkpoint=...)", resume_from_checkpoint=None),
    # -- optimizer ----------------------------------------------------------------------------------------------------------------------
    _mapped(
        learning_rate=("learner.learning_rate", 1e-6),
        weight_decay=("learner.weight_decay", 0.0),
        adam_beta1=("learner.adam_beta1", 0.9),
        adam_beta2=("learner.adam_beta2", 0.999),
        adam_epsilon=("learner.adam_epsilon", 1e-8),
        max_grad_norm=("learner.max_grad_norm", 1.0),
        gradient_checkpointing=("learner.gradient_checkpointing", True),
    ),
    _honoured("constant, constant_with_warmup, linear and cosine; others are refused", lr_scheduler_type="linear"),
    _honoured("steps, or a share of them below 1: learner.warmup_steps", warmup_steps=0, warmup_ratio=0.0),
    _honoured(
        "adamw_torch and adamw_torch_fused are what is used, adamw_torch_8bit is learner.optimizer = adamw_8bit; others are refused",
        optim="adamw_torch_fused",
    ),
    _honoured("bf16 = False trains in float32; otherwise float32 on CPU, bfloat16 on a GPU: learner.dtype", bf16=None),
    _refused("leave it out: learner.dtype is float32 or bfloat16", fp16=False),
    _refused(
        "leave it out: AdamW with one learning rate is used; your own loss goes into learner={'objective': 'file.py:name'}",
        optim_args=None,
        optim_target_modules=None,
        lr_scheduler_kwargs=None,
        label_smoothing_factor=0.0,
        neftune_noise_alpha=None,
        adafactor=False,
    ),
    # -- model --------------------------------------------------------------------------------------------------------------------------
    _refused("give the model's folder or hub id as it is to be loaded; engine= and learner= have dtype", model_init_kwargs=None),
    _refused("models run by transformers' and vLLM's own code only; convert the model", trust_remote_code=False),
    _refused("mixture-of-experts models are trained without an auxiliary loss; leave it out", router_aux_loss_coef=None),
    # -- sampling -----------------------------------------------------------------------------------------------------------------------
    _mapped(num_generations=("rollout.num_generations", 8), temperature=("rollout.temperature", 1.0)),
    _honoured(
        "of the whole conversation, tool results included: rollout.max_conversation_tokens; None: what the engine's window holds",
        max_completion_length=512,
    ),
    _honoured("rounds of tool calls; None: until length ends it: rollout.max_calls", max_tool_calling_iterations=None),
    _mapped(chat_template_kwargs=("rollout.chat_template_kwargs", None)),
    _refused("tokens are trained with the logprobs of the whole distribution; use temperature alone", top_p=1.0, repetition_penalty=1.0),
    _honoured("-1 and 0 switch it off, as here; others are refused: use temperature alone", top_k=0),
    _honoured("0 switches it off, as here; others are refused: use temperature alone", min_p=None),
    # -- engine -------------------------------------------------------------------------------------------------------------------------
    _honoured("a running server: engine.url; left out, an engine is launched and ended with the run", vllm_server_base_url=None),
    _mapped(vllm_server_timeout=("engine.start_timeout_s", 240.0)),
    # -- checkpoints --------------------------------------------------------------------------------------------------------------------
    _honoured("optimizer steps, rounded up to whole batches: checkpoint.every; the last step is always saved", save_steps=500),
    _honoured("'no' and 'epoch' set checkpoint.every accordingly; 'best' is refused", save_strategy="steps"),
    _honoured("checkpoint.keep; left out, the last two are kept", save_total_limit=None),
    _accepted("a checkpoint holds what a resumed run needs", save_only_model=False, save_on_each_node=False, enable_jit_checkpoint=False),
    _refused(
        "it would need a judge of the best; checkpoints are kept by age (save_total_limit), and each can be evaluated (harness-rl eval)",
        load_best_model_at_end=False,
        metric_for_best_model=None,
        greater_is_better=None,
    ),
    # -- evaluation ---------------------------------------------------------------------------------------------------------------------
    _honoured("anything but 'no' evaluates eval_dataset at the end", eval_strategy="no"),
    _honoured("eval.at_start", eval_on_start=False),
    _accepted("evaluation is at the start and the end", eval_steps=None, eval_delay=0, do_eval=False),
    _accepted(
        "an evaluation runs eval.samples episodes of every row, as many at once as training does",
        per_device_eval_batch_size=8,
        prediction_loss_only=False,
        eval_do_concat_batches=True,
        eval_use_gather_object=False,
        eval_accumulation_steps=None,
        include_for_metrics=None,
        include_inputs_for_metrics=False,
        batch_eval_metrics=False,
        bf16_full_eval=False,
        fp16_full_eval=False,
    ),
    # -- logging ------------------------------------------------------------------------------------------------------------------------
    _accepted(
        "every step is a line of metrics.jsonl in the run folder",
        logging_strategy="steps",
        logging_steps=10,
        logging_first_step=False,
        logging_dir=None,
        log_on_each_node=True,
        logging_nan_inf_filter=True,
        include_num_input_tokens_seen="no",
        include_tokens_per_second=False,
        log_level="passive",
        log_level_replica="warning",
    ),
    _accepted(
        "metrics.jsonl, reward.png and the viewer are local; nothing is sent anywhere",
        report_to="none",
        run_name=None,
        project="huggingface",
        trackio_space_id=None,
        trackio_bucket_id=None,
        trackio_static_space_id=None,
    ),
    _accepted("the live panel is shown on terminals only", disable_tqdm=None),
    _accepted(
        "every rollout is recorded whole; harness-rl trace RUN shows them token by token",
        log_completions=False,
        num_completions_to_print=None,
    ),
    _honoured("each checkpoint is a commit of hub_model_id, which must be given: checkpoint.push_to_hub", push_to_hub=False),
    _honoured("'owner/name'; of effect with push_to_hub", hub_model_id=None),
    _honoured("of a repository that does not exist yet; left out, it is private: checkpoint.hub_private", hub_private_repo=None),
    _refused("leave it out and give push_to_hub=True and hub_model_id", push_to_hub_model_id=None, push_to_hub_organization=None),
    _refused("the token is huggingface_hub's own: set HF_TOKEN, or run hf auth login", hub_token=None, push_to_hub_token=None),
    _refused("commits go to the main branch; leave it out", hub_revision=None),
    _accepted(
        "every checkpoint is pushed; of those that come during an upload the newest", hub_strategy="every_save", hub_always_push=False
    ),
    # -- data ---------------------------------------------------------------------------------------------------------------------------
    _accepted(
        "rows are handed to environments one by one; there is no data loader",
        data_seed=None,
        dataloader_drop_last=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=True,
        dataloader_persistent_workers=False,
        dataloader_prefetch_factor=None,
        dataloader_multiprocessing_context=None,
        dataloader_in_order=True,
        accelerator_config=None,
        label_names=None,
        length_column_name="length",
        group_by_length=False,
        past_index=-1,
        ignore_data_skip=False,
    ),
    _honoured("'sequential' keeps the data set's order; 'random' is shuffle_dataset's", train_sampling_strategy="random"),
    # -- machines -----------------------------------------------------------------------------------------------------------------------
    _honoured("learner.device and engine.device = cpu", use_cpu=False, no_cuda=False),
    _refused(
        "leave it out; learner={'processes': N} shards the model over N processes (FSDP2)",
        deepspeed=None,
        fsdp=None,
        fsdp_min_num_params=0,
        fsdp_transformer_layer_cls_to_wrap=None,
        mp_parameters="",
        use_mps_device=False,
        tpu_num_cores=None,
    ),
    _refused(
        "leave it out; learner={'processes': N, 'context_parallel': M} shards the model over N processes, of which M share a long row",
        parallelism_config=None,
    ),
    _accepted(
        "learner.processes says how many there are, and they find each other",
        fsdp_config=None,
        local_rank=-1,
        average_tokens_across_devices=True,
        ddp_find_unused_parameters=None,
        ddp_bucket_cap_mb=None,
        ddp_broadcast_buffers=None,
        ddp_static_graph=None,
        ddp_backend=None,
        ddp_timeout=1800,
        tpu_metrics_debug=False,
        ray_scope="last",
    ),
    _refused("micro-batches are packed to learner.micro_batch_tokens; lower that instead", auto_find_batch_size=False),
    _accepted(
        "it changes how fast a forward pass is, or what it logs, not what is learned; the learner has its own ways",
        tf32=None,
        torch_compile=False,
        torch_compile_backend=None,
        torch_compile_mode=None,
        torchdynamo=None,
        use_liger_kernel=False,
        liger_kernel_config=None,
        use_cache=False,
        torch_empty_cache_steps=None,
        gradient_checkpointing_kwargs=None,
        activation_checkpointing=None,
        activation_checkpointing_kwargs=None,
        full_determinism=False,
        debug="",
        skip_memory_metrics=True,
        jit_mode_eval=False,
        fp16_opt_level="O1",
        fp16_backend="auto",
        half_precision_backend="auto",
        save_safetensors=True,
        use_legacy_prediction_loop=False,
    ),
    _accepted("callbacks keep no state in checkpoints", restore_callback_states_from_checkpoint=False),
    _accepted("train() and evaluate() say what is done", do_train=False, do_predict=False),
    _accepted("a run never writes over another: it takes the next free name", overwrite_output_dir=False),
    _accepted("per_device_train_batch_size is the one that counts", per_gpu_train_batch_size=None, per_gpu_eval_batch_size=None),
)
"""What both configs have, TrainingArguments (transformers 4.57 to 5.24) included."""

GRPO = _table(
    # -- batches ------------------------------------------------------------------------------------------------------------------------
    _honoured(
        "completions sampled at once; several optimizer steps on them are learner.minibatches",
        generation_batch_size=None,
        steps_per_generation=None,
    ),
    _refused("each sample is trained once; steps_per_generation makes several optimizer steps of one sampling", num_iterations=1),
    _mapped(shuffle_dataset=("rollout.shuffle_tasks", True)),
    _accepted("an evaluation makes eval.samples episodes of every row", num_generations_eval=None),
    _accepted("every column reaches environments and reward functions", remove_unused_columns=False),
    _accepted("rows are packed without padding", pad_to_multiple_of="auto"),
    # -- loss ---------------------------------------------------------------------------------------------------------------------------
    _honoured("dapo, grpo, bnpo, dr_grpo, cispo: learner.objective and learner.loss_normalisation; others are refused", loss_type="dapo"),
    _honoured("learner.epsilon_low, learner.epsilon_high", epsilon=0.2, epsilon_high=None),
    _honoured("learner.ratio_max", delta=None),
    _honoured("learner.kl_beta", beta=0.0),
    _honoured("token, or sequence (GSPO)", importance_sampling_level="token"),
    _honoured("group or none: rollout.normalise_advantage; batch is refused", scale_rewards="group"),
    _honoured(
        "learner.corrections",
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="sequence_mask",
        vllm_importance_sampling_clip_max=3.0,
        vllm_importance_sampling_clip_min=None,
        vllm_importance_sampling_cap=None,
    ),
    _mapped(reward_weights=("reward.weights", None)),
    _refused(
        "rewards are summed, then normalised; return one function's combined reward instead",
        multi_objective_aggregation="sum_then_normalize",
    ),
    _mapped(mask_truncated_completions=("rollout.mask_truncated", False)),
    _refused(
        "there is no such term here; your own loss goes into learner={'objective': 'file.py:name'}",
        top_entropy_quantile=1.0,
        entropy_coef=0.0,
        use_adaptive_entropy=False,
        off_policy_mask_threshold=None,
    ),
    _accepted(
        "it belongs to a loss term that is off",
        entropy_coef_min=0.0,
        entropy_coef_max=1.0,
        entropy_coef_delta=0.005,
        entropy_target=0.2,
        sapo_temperature_neg=1.05,
        sapo_temperature_pos=1.0,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        ref_model_mixup_alpha=0.6,
        ref_model_sync_steps=512,
    ),
    _refused("the reference policy stays what the run started from", sync_ref_model=False),
    _accepted("the KL term is the one of learner/objectives/kl.py", use_bias_correction_kl=True),
    _accepted("models are trained without dropout, in float32 parameters", disable_dropout=False, cast_lm_head_to_fp32=False),
    # -- generation ---------------------------------------------------------------------------------------------------------------------
    _accepted(
        "sampling is always vLLM's",
        use_vllm=False,
        cache_implementation=None,
        ds3_gather_for_generation=True,
        use_transformers_continuous_batching=False,
        transformers_continuous_batching_config=None,
        use_transformers_paged=False,
    ),
    _refused("tokens are trained with the logprobs of the whole distribution; use temperature alone", generation_kwargs=None),
    _refused("a grammar changes the distribution; constrain with a reward instead", vllm_structured_outputs_regex=None),
    _honoured(
        "colocate launches the engine here; where one GPU is all there is, it shares it with the learner (sync.backend = ipc); "
        "server connects to vllm_server_base_url, or host and port",
        vllm_mode="colocate",
    ),
    _honoured("engine.url, with vllm_mode = server", vllm_server_host="0.0.0.0", vllm_server_port=8000),
    _mapped(vllm_gpu_memory_utilization=("engine.gpu_memory_fraction", 0.3)),
    _honoured("engine.max_model_len; left out, max_completion_length and room for a prompt", vllm_max_model_length=None),
    _honoured("--tensor-parallel-size of a launched engine", vllm_tensor_parallel_size=1),
    _honoured("'transformers' is --model-impl transformers of a launched engine", vllm_model_impl="vllm"),
    _accepted("the engine keeps its memory; lower vllm_gpu_memory_utilization instead", vllm_enable_sleep_mode=False),
    _accepted("ports of the weight transfer are chosen free", vllm_group_port=51216),
    # -- logging ------------------------------------------------------------------------------------------------------------------------
    _accepted(
        "every rollout is recorded whole; harness-rl trace RUN shows them token by token", log_unique_prompts=False, log_multimodal=True
    ),
    _refused("nothing is uploaded; rollouts/ of the run folder holds every completion", log_completions_hub_repo=None),
)
"""GRPOConfig's own."""

ASYNC = _table(
    _honoured("float32 or auto (float32 on CPU, bfloat16 on a GPU), bfloat16: learner.dtype", dtype="float32"),
    _honoured("constant, constant_with_warmup, linear and cosine; others are refused", lr_scheduler_type="constant"),
    _honoured(
        "of the whole conversation, tool results included: rollout.max_conversation_tokens; None: what the engine's window holds",
        max_completion_length=2048,
    ),
    _honoured("learner.epsilon_low, learner.epsilon_high", epsilon=0.2, epsilon_high=None),
    _mapped(max_staleness=("rollout.max_staleness", 4), weight_sync_timeout=("sync.timeout_s", 1800)),
    _honoured("rollout.max_concurrent_rollouts; -1: max_staleness times a step's completions", max_inflight_tasks=-1),
    _honoured("the later name of max_inflight_tasks", max_concurrent_rollouts=-1),
    _honoured("learner.micro_batch_tokens; left out, what the engine's window holds; 0 and less are refused", token_budget=None),
    _accepted(
        "a conversation keeps its sampled ids; one that is rewritten is a row of its own, whatever its size", fork_threshold_tokens=1024
    ),
    _accepted("a call waits as long as its rollout may: rollout.agent_timeout_s", request_timeout=600),
    _accepted("finished groups are bounded by max_staleness", queue_maxsize=1024),
    _mapped(weight_sync_steps=("sync.every", 1)),
    _accepted("rollouts run in this process", heartbeat_stale_after_s=300.0),
    _accepted("every step is a line of metrics.jsonl in the run folder", logging_steps=1),
    _accepted("rows are handed to environments one by one; there is no data loader", ignore_data_skip=True),
)
"""AsyncGRPOConfig's own, and what it says otherwise."""

ARGUMENTS = _table(
    _honoured("a folder, a hub id or a name of harness-rl models; a loaded model is refused: save it and give its folder", model=None),
    _honoured("functions, called for each finished rollout with lists of one; reward models are refused: serve them", reward_funcs=None),
    _honoured("GRPOConfig or AsyncGRPOConfig", args=None),
    _honoured("anything that yields rows; may be left out with one environment and max_steps", train_dataset=None),
    _honoured("rows of evaluations at the start and the end", eval_dataset=None),
    _honoured("kept for your functions; the engine renders with the model's own: another chat template is refused", processing_class=None),
    _honoured("on_train_begin, on_step_end, on_log, on_save, on_train_end; control.should_training_stop ends the run", callbacks=None),
    _honoured("sync or async functions with type hints and a Google-style docstring", tools=None),
    _honoured(
        "called for each rollout with one prompt and trainer.generate; ids that the proxy did not capture are not trained",
        rollout_func=None,
    ),
    _honoured("a class, a callable without arguments, or a mapping of names to them", environment_factory=None),
    _refused("leave it out: the learner builds AdamW from the config", optimizers=(None, None)),
    _refused("reward models are not loaded here: serve it and call it from a reward function", reward_processing_classes=None),
    _refused("weights are float32 or bfloat16; leave it out", quantization_config=None),
    _honoured(
        "r, lora_alpha and target_modules of a LoraConfig: learner.lora_rank, lora_alpha, lora_targets; what else it asks for is refused",
        peft_config=None,
    ),
    _refused("rollouts are made in this process; leave it out", rollout_worker=None),
    _refused("weights are pushed by sync.backend; leave it out", weight_transfer=None),
)
"""Of the trainers' constructors."""


def grpo_fields() -> dict[str, Field]:
    return COMMON | GRPO


def async_fields() -> dict[str, Field]:
    """AsyncGRPOConfig's, and GRPOConfig's losses and engine, which it takes too."""
    return COMMON | GRPO | ASYNC
