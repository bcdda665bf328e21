"""What reads records: tables, plots and pages."""
