"""The page of ``wlb-studies page``: the verdict of ``wlb check`` in a browser, made with Streamlit."""
