INSERT INTO api_keys (id, name, role, secret_hash, created_at, expires_at, revoked_at)
VALUES ('k1', 'ada', 'user', 'h', '2026-11-29 13:00:00.000000', NULL, NULL);
INSERT INTO clusters (name, key, spec_json, stored_at)
VALUES ('pair', 'b3a30af728899aac', '{"device":{"kind":"cuda","memory_bytes":85899345920,"memory_bytes_per_s":null,"name":"card","peak_flops_per_s":{"bf16":300000000000000.0},"source":""},"gpus_per_node":4,"inter":{"bytes_per_s":null,"latency_s":null,"name":"ib","source":""},"intra":{"bytes_per_s":300000000000.0,"latency_s":null,"name":"nvlink","source":""},"name":"pair","nics_per_node":1,"nodes":2}', '2026-11-29 13:08:51.074594');
INSERT INTO counters (name, value)
VALUES ('token', 7);
INSERT INTO fingerprints (key, hostname, device_name, device_count, driver, runtime, collective_library, torch, spec_json, stored_at)
VALUES ('6b1d2835c830a0d3', 'node-1', 'card', 8, '580.1', '', '', '2.11.0', '{"clocks":{"sm":1980.0},"collective_library":"","cpu":"","cpu_cores":0,"device_count":8,"device_memory_bytes":85899345920,"device_name":"card","driver":"580.1","environment":{"NCCL_ALGO":"Ring"},"hostname":"node-1","libraries":{"nccl":"2.28"},"os":"","python":"","runtime":"","torch":"2.11.0"}', '2026-11-29 13:08:51.080945');
INSERT INTO models (name, key, spec_json, stored_at)
VALUES ('tiny', 'f713d7c3f84cd22a', '{"dense_layers":0,"expert_ffn":0,"experts":0,"ffn":172,"gated":true,"head_dim":16,"heads":4,"hidden":64,"kv_heads":2,"latent_attention":null,"layers":4,"linear_bias":false,"max_positions":0,"name":"tiny","norm":"rmsnorm","position":"rope","qk_norm":false,"qkv_bias":false,"shared_experts":0,"source":"ours","tied":false,"top_k":0,"vocab":512}', '2026-11-29 13:08:51.051105');
INSERT INTO nodes (name, pool, address, topology, device_json, slots, nics, cores, memory_bytes, fingerprint_key, environment_key, session, state, reason, failures, world_id, registered_at, heartbeat_at)
VALUES ('node-1', 'h100', '10.0.0.1', 'rack-1', '{"name":"card"}', 4, 1, 64, 85899345920, '6b1d2835c830a0d3', 'env', 's1', 'up', '', 0, '', '2026-11-29 13:00:00.000000', '2026-11-29 13:00:00.000000');
INSERT INTO tunings (id, model_name, model_key, model_json, cluster_name, cluster_key, cluster_json, devices, workload_key, workload_json, seq_len, global_batch, dtype, space_json, budget_json, seed, cold, state, message, stop_reason, owner, gpu_s_spent, created_at, updated_at, sampler, pool, principal, sharing_key, claimed_at, claim_expires_at, advanced_at)
VALUES ('first-release', 'tiny', 'f713d7c3f84cd22a', '{"dense_layers":0,"expert_ffn":0,"experts":0,"ffn":172,"gated":true,"head_dim":16,"heads":4,"hidden":64,"kv_heads":2,"latent_attention":null,"layers":4,"linear_bias":false,"max_positions":0,"name":"tiny","norm":"rmsnorm","position":"rope","qk_norm":false,"qkv_bias":false,"shared_experts":0,"source":"ours","tied":false,"top_k":0,"vocab":512}', 'pair', 'b3a30af728899aac', '{"device":{"kind":"cuda","memory_bytes":85899345920,"memory_bytes_per_s":null,"name":"card","peak_flops_per_s":{"bf16":300000000000000.0},"source":""},"gpus_per_node":4,"inter":{"bytes_per_s":null,"latency_s":null,"name":"ib","source":""},"intra":{"bytes_per_s":300000000000.0,"latency_s":null,"name":"nvlink","source":""},"name":"pair","nics_per_node":1,"nodes":2}', 8, '9052f5df13aade81', '{"dtype":"bf16","global_batch":16,"grad_dtype":"fp32","optimizer":"adamw","seq_len":128}', 128, 16, 'bf16', '{"cp":null,"ep":null,"micro_batch":null,"pp":null,"recompute":null,"schedule":null,"sequence_parallel":null,"tp":[1,2],"vpp":null,"zero_stage":null}', '{"gpu_s":600.0,"max_trials":12,"min_gain":0.01}', 7, false, 'searching', '', '', 'me', 36.0, '2026-05-04 03:02:01.123456', '2026-11-29 13:08:51.272415', 'tpe', 'h100', 'ada', 'first-question', '2026-11-29 13:00:00.000000', '2026-11-29 13:00:00.000000', '2026-11-29 13:00:00.000000');
INSERT INTO idempotency_keys (principal, key, request_digest, tuning_id, created_at)
VALUES ('ada', 'k', 'd', 'first-release', '2026-11-29 13:00:00.000000');
INSERT INTO node_incidents (id, node, at, kind, message, job_id)
VALUES (1, 'node-1', '2026-11-29 13:00:00.000000', 'lost', 'no heartbeat', 'job-1');
INSERT INTO probe_runs (id, tuning_id, cluster_key, cluster_json, fingerprint_key, kind, request_json, wall_s, gpu_s, setup_s, log_path, finished_at, failure_kind, failure_message, failure_rank, failure_stage, failure_log_path, failure_log_tail)
VALUES ('914357abd0ab4bda8fef856a3dcea1b0', 'first-release', 'b3a30af728899aac', '{"device":{"kind":"cuda","memory_bytes":85899345920,"memory_bytes_per_s":null,"name":"card","peak_flops_per_s":{"bf16":300000000000000.0},"source":""},"gpus_per_node":4,"inter":{"bytes_per_s":null,"latency_s":null,"name":"ib","source":""},"intra":{"bytes_per_s":300000000000.0,"latency_s":null,"name":"nvlink","source":""},"name":"pair","nics_per_node":1,"nodes":2}', '6b1d2835c830a0d3', 'collective', '{"group_size":4,"iterations":7,"kind":"collective","op":"all_reduce","sizes_bytes":[1024,8589934592],"stride":2,"warmup":2}', 2.0, 16.0, 0.5, NULL, '2026-11-29 13:08:51.272415', NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO probe_runs (id, tuning_id, cluster_key, cluster_json, fingerprint_key, kind, request_json, wall_s, gpu_s, setup_s, log_path, finished_at, failure_kind, failure_message, failure_rank, failure_stage, failure_log_path, failure_log_tail)
VALUES ('c4746f287da047f6b22c52fa85fefe4b', NULL, 'b3a30af728899aac', '{"device":{"kind":"cuda","memory_bytes":85899345920,"memory_bytes_per_s":null,"name":"card","peak_flops_per_s":{"bf16":300000000000000.0},"source":""},"gpus_per_node":4,"inter":{"bytes_per_s":null,"latency_s":null,"name":"ib","source":""},"intra":{"bytes_per_s":300000000000.0,"latency_s":null,"name":"nvlink","source":""},"name":"pair","nics_per_node":1,"nodes":2}', '6b1d2835c830a0d3', 'layer', '{"iterations":7,"kind":"layer","micro_batch":1,"model":{"dense_layers":0,"expert_ffn":0,"experts":0,"ffn":172,"gated":true,"head_dim":16,"heads":4,"hidden":64,"kv_heads":2,"latent_attention":null,"layers":4,"linear_bias":false,"max_positions":0,"name":"tiny","norm":"rmsnorm","position":"rope","qk_norm":false,"qkv_bias":false,"shared_experts":0,"source":"ours","tied":false,"top_k":0,"vocab":512},"part":"layer","recompute":"none","sequence_parallel":false,"tp":2,"warmup":2,"workload":{"dtype":"bf16","global_batch":16,"grad_dtype":"fp32","optimizer":"adamw","seq_len":128}}', 1.0, 8.0, 0.5, '/logs/layer', '2026-11-29 13:08:51.284828', NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO profiles (id, cluster_key, fingerprint_key, compute_flops_per_s, compute_launch_s, step_scale, step_scale_trials, step_overhead_s, memory_overhead_bytes, memory_scale, spec_json, stored_at)
VALUES (1, 'b3a30af728899aac', '6b1d2835c830a0d3', 250000000000000.0, 4e-06, 1.0625, 0, 0.0, 0.0, 1.0, '{"cluster_key":"b3a30af728899aac","compute":{"bytes_per_s":null,"flops_per_s":250000000000000.0,"launch_s":4e-06,"readings":12,"relative_error":0.03},"fingerprint_key":"6b1d2835c830a0d3","links":[{"bytes_per_s":33333333333.333332,"crosses_nodes":true,"group_size":4,"latency_s":1e-05,"op":"all_reduce","readings":9,"relative_error":0.02,"stride":2}],"memory_overhead_bytes":0.0,"memory_scale":1.0,"step_overhead_s":0.0,"step_scale":1.0625,"step_scale_trials":0}', '2026-11-29 13:08:51.295803');
INSERT INTO tuning_events (id, tuning_id, kind, at, data_json)
VALUES (1, 'first-release', 'state', '2026-11-29 13:00:00.000000', '{"state":"searching"}');
INSERT INTO tuning_interests (tuning_id, principal)
VALUES ('first-release', 'ada');
INSERT INTO tuning_trials (id, tuning_id, number, state, estimate_json, estimate_step_time_s, estimate_tokens_per_s_per_gpu, estimate_peak_memory_bytes, fingerprint_key, gpu_s, setup_s, owner, started_at, finished_at, plan_key, plan_json, tp, pp, dp, cp, ep, vpp, micro_batch, zero_stage, recompute, sequence_parallel, schedule, failure_kind, failure_message, failure_rank, failure_stage, failure_log_path, failure_log_tail)
VALUES ('first-release-0', 'first-release', 0, 'complete', '{"basis":"profile","bytes":{"activations":5000000000.0,"buffers":0.0,"gradients":2000000000.0,"logits":1.5,"optimizer":4000000000.0,"parameters":1000000000.0},"fits":true,"mfu":null,"peak_memory_bytes":12500000000.0,"seconds":{"bubble":0.3333333333333333,"compute":0.1,"cp":0.0,"dp_exposed":0.05,"ep":0.0,"optimizer":9.094947017729282e-13,"pp_p2p":1e-07,"tp":0.2},"step_time_s":0.7,"tokens_per_s_per_gpu":1234.5678901234567,"worst_stage":1}', 0.7, 1234.5678901234567, 12500000000.0, '6b1d2835c830a0d3', 10.0, 1.0, 'me', '2026-05-04 03:02:01.123456', '2026-11-29 13:08:51.234473', 'tp2.pp2.dp2.mb1.zero0', '{"cp":1,"dp":2,"ep":1,"micro_batch":1,"pp":2,"recompute":"none","schedule":"1f1b","sequence_parallel":false,"tp":2,"vpp":1,"zero_stage":0}', 2, 2, 2, 1, 1, 1, 1, 0, 'none', false, '1f1b', NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO tuning_trials (id, tuning_id, number, state, estimate_json, estimate_step_time_s, estimate_tokens_per_s_per_gpu, estimate_peak_memory_bytes, fingerprint_key, gpu_s, setup_s, owner, started_at, finished_at, plan_key, plan_json, tp, pp, dp, cp, ep, vpp, micro_batch, zero_stage, recompute, sequence_parallel, schedule, failure_kind, failure_message, failure_rank, failure_stage, failure_log_path, failure_log_tail)
VALUES ('first-release-1', 'first-release', 1, 'failed', NULL, NULL, NULL, NULL, '6b1d2835c830a0d3', 10.0, 1.0, 'me', '2026-05-04 03:02:02.123456', '2026-11-29 13:08:51.267378', 'tp2.pp2.dp2.mb1.zero0', '{"cp":1,"dp":2,"ep":1,"micro_batch":1,"pp":2,"recompute":"none","schedule":"1f1b","sequence_parallel":false,"tp":2,"vpp":1,"zero_stage":0}', 2, 2, 2, 1, 1, 1, 1, 0, 'none', false, '1f1b', 'oom', 'rank 3: out of memory', 3, 1, '/logs/3', 'one line');
INSERT INTO collective_measurements (id, probe_run_id, cluster_key, fingerprint_key, op, group_size, stride, size_bytes, iterations, time_s, time_p10_s, time_p90_s, algbw_bytes_per_s, busbw_bytes_per_s)
VALUES (1, '914357abd0ab4bda8fef856a3dcea1b0', 'b3a30af728899aac', '6b1d2835c830a0d3', 'all_reduce', 4, 2, 1024, 7, 1e-05, 9e-06, 1.1000000000000001e-05, 102399999.99999999, 153600000.0);
INSERT INTO collective_measurements (id, probe_run_id, cluster_key, fingerprint_key, op, group_size, stride, size_bytes, iterations, time_s, time_p10_s, time_p90_s, algbw_bytes_per_s, busbw_bytes_per_s)
VALUES (2, '914357abd0ab4bda8fef856a3dcea1b0', 'b3a30af728899aac', '6b1d2835c830a0d3', 'all_reduce', 4, 2, 8589934592, 7, 0.5, 0.45, 0.55, 17179869184.0, 25769803776.0);
INSERT INTO jobs (id, purpose, pool, cluster_json, devices, request_json, tuning_id, trial_id, principal, environment_key, only_node, avoid_json, attempt, deadline_s, state, cancelled, token, world_id, warm, endpoint, progress_json, failure_kind, message, created_at, granted_at, ended_at)
VALUES ('job-1', 'trial', 'h100', '{}', 4, '{}', 'first-release', 'first-release-0', 'ada', 'env', '', '[]', 1, 600.0, 'done', false, 7, 'w1', true, '10.0.0.1:9000', NULL, NULL, '', '2026-11-29 13:00:00.000000', '2026-11-29 13:00:00.000000', '2026-11-29 13:00:00.000000');
INSERT INTO layer_measurements (id, probe_run_id, cluster_key, fingerprint_key, model_key, workload_key, part, tp, micro_batch, recompute, sequence_parallel, iterations, forward_s, backward_s, forward_p10_s, forward_p90_s, backward_p10_s, backward_p90_s, forward_calc_s, backward_calc_s, saved_bytes, peak_bytes, parameter_bytes, memory_source)
VALUES (1, 'c4746f287da047f6b22c52fa85fefe4b', 'b3a30af728899aac', '6b1d2835c830a0d3', 'f713d7c3f84cd22a', '9052f5df13aade81', 'layer', 2, 1, 'selective', true, 7, 0.1, 0.2, 0.09, 0.11, 0.19, 0.21, 0.08, 0.17, 2147483648, 4294967296, 1048576, 'tensors');
INSERT INTO step_measurements (id, trial_id, probe_run_id, cluster_key, fingerprint_key, tokens_per_s_per_gpu, interval_low_tokens_per_s_per_gpu, interval_high_tokens_per_s_per_gpu, repeats, step_time_s, steady, traced_step_s, t_calc_s, t_comm_s, t_comm_exposed_s, mu, mfu, peak_allocated_bytes, peak_reserved_bytes, memory_source, pruned, setup_s)
VALUES (1, 'first-release-0', NULL, 'b3a30af728899aac', '6b1d2835c830a0d3', 0.3333333333333333, 0.3, 0.3666666666666667, 3, 0.30000000000000004, true, 0.31, 0.1, 0.6666666666666666, 5e-324, 6.666666666666666, 0.41, 75161927681, 80530636800, 'torch.cuda', false, 4.5);
INSERT INTO job_members (job_id, number, node, address, state, expires_at, failure_kind, report_json)
VALUES ('job-1', 0, 'node-1', '10.0.0.1', 'done', '2026-11-29 13:00:00.000000', NULL, '{}');
INSERT INTO leases (node, job_id, token)
VALUES ('node-1', 'job-1', 7);
INSERT INTO rank_measurements (id, step_measurement_id, rank, stage, hostname, t_calc_s, t_comm_s, t_comm_exposed_s, peak_allocated_bytes, peak_reserved_bytes)
VALUES (1, 1, 0, 0, 'node-0', 0.1, 0.6666666666666666, 5e-324, 75161927680, 80530636800);
INSERT INTO rank_measurements (id, step_measurement_id, rank, stage, hostname, t_calc_s, t_comm_s, t_comm_exposed_s, peak_allocated_bytes, peak_reserved_bytes)
VALUES (2, 1, 1, 0, 'node-1', 0.1, 0.6666666666666666, 5e-324, 75161927681, 80530636800);
INSERT INTO step_samples (step_measurement_id, series, number, value)
VALUES (1, 'loss', 0, 11.5);
INSERT INTO step_samples (step_measurement_id, series, number, value)
VALUES (1, 'loss', 1, 11.25);
INSERT INTO step_samples (step_measurement_id, series, number, value)
VALUES (1, 'loss', 2, 3.0000000001);
INSERT INTO step_samples (step_measurement_id, series, number, value)
VALUES (1, 'step', 0, 0.3);
INSERT INTO step_samples (step_measurement_id, series, number, value)
VALUES (1, 'step', 1, 0.30000000000000004);
INSERT INTO step_samples (step_measurement_id, series, number, value)
VALUES (1, 'step', 2, 0.29);
INSERT INTO step_samples (step_measurement_id, series, number, value)
VALUES (1, 'warmup', 0, 1.0);
INSERT INTO step_samples (step_measurement_id, series, number, value)
VALUES (1, 'warmup', 1, 0.5);
INSERT INTO rank_comm_times (rank_measurement_id, op, time_s)
VALUES (1, 'dp', 1e-09);
INSERT INTO rank_comm_times (rank_measurement_id, op, time_s)
VALUES (1, 'tp', 0.1);
INSERT INTO rank_comm_times (rank_measurement_id, op, time_s)
VALUES (2, 'dp', 1e-09);
INSERT INTO rank_comm_times (rank_measurement_id, op, time_s)
VALUES (2, 'tp', 1.1);
