"""Pipeline schedules: what each rank runs in which order, and how long a step then takes."""
