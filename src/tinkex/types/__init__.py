"""All types of the protocol: `from tinkex import types`. Each is listed in its module's `__all__`."""

from tinkex.compat.submodule_aliases import aliases as _aliases
from tinkex.wire.billing import *
from tinkex.wire.checkpoints import *
from tinkex.wire.client_config import *
from tinkex.wire.custom_loss import *
from tinkex.wire.errors import RequestErrorCategory as RequestErrorCategory
from tinkex.wire.futures import *
from tinkex.wire.inputs import *
from tinkex.wire.sampling import *
from tinkex.wire.sessions import *
from tinkex.wire.telemetry import *
from tinkex.wire.tensors import *
from tinkex.wire.training import *

__all__ = [name for name in dir() if not name.startswith("_")]

# The official client has a module for each of these; programs import some of them by path.
__path__.append(
    _aliases(
        __name__,
        "audit_log_entry audit_log_response auth_token_response billing_usage_request "
        "billing_usage_response checkpoint checkpoints_list_response client_config_request "
        "client_config_response client_dynamic_config_response copy_weights_request "
        "copy_weights_response create_custom_loss_request create_custom_loss_response "
        "create_model_request create_model_response create_sampling_session_request "
        "create_sampling_session_response create_session_request create_session_response "
        "current_checkpoint_storage_usage_request current_checkpoint_storage_usage_response cursor "
        "custom_loss_graph custom_loss_input datum dmel_chunk encoded_text_chunk event_type "
        "external_weights_urls_response forward_backward_input forward_backward_output "
        "forward_backward_request forward_request future_completion future_retrieve_request "
        "future_retrieve_response futures_retrieve_request futures_retrieve_response generic_event "
        "get_info_request get_info_response get_sampler_response get_server_capabilities_response "
        "get_session_response health_response image_asset_pointer_chunk image_chunk "
        "join_sampling_session_request join_sampling_session_response list_sessions_response "
        "load_weights_request load_weights_response lora_config loss_fn_inputs loss_fn_output "
        "loss_fn_type model_id model_input model_input_chunk optim_step_request optim_step_response "
        "optimizer prompt_alt_tokens provenance_spans request_error_category request_failed_response "
        "request_id sample_request sample_response sampled_sequence sampling_params "
        "save_weights_external_request save_weights_external_response save_weights_for_sampler_request "
        "save_weights_for_sampler_response save_weights_request save_weights_response search_owner "
        "session_end_event session_heartbeat_request session_heartbeat_response session_search_cursor "
        "session_search_request session_search_response session_start_event session_status "
        "session_status_query session_summary severity shared shared.untyped_api_future stop_reason "
        "telemetry_batch telemetry_event telemetry_response telemetry_send_request tensor_data "
        "tensor_dtype topk_logprobs training_run training_runs_response try_again_response "
        "unhandled_exception_event unload_model_request unload_model_response weights_info_response "
        "whoami_response",
    )
)
