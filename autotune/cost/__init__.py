"""The cost model: seconds and bytes of a plan by named part. numpy only; one formula for one plan and for a million."""
